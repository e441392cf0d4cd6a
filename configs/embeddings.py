"""Heads and probes from embeddings, without images.

  memory-vit embed --backbone=NPZ --input=DATA/train \\
    --output=EMBEDDED/train
  memory-vit embed --backbone=NPZ --input=DATA/test \\
    --output=EMBEDDED/test
  memory-vit train --config=embeddings --workdir=DIR \\
    --config.backbone=NPZ --config.data.dir=EMBEDDED

EMBEDDED may be a single output of `embed`, which is then the split "train":
--config.data.train='train[:80%]', --config.data.validation='train[80%:90%]',
--config.data.test='train[90%:]'. --config.regime=probe uses all layers. The
task records how the embedded images were prepared. The default is 50 epochs,
and at least 25 steps; --config.epochs=N changes it.
"""

import ml_collections

from memory_vit.configs import base


def get_config() -> ml_collections.ConfigDict:
  """A linear head on the outputs of a frozen backbone."""
  config = base.get_config()
  config.regime = "head"
  config.data.name = "embeddings"
  # Rows are in an order that mixes the classes, so the last tenth is a fair
  # sample. "validation" is an output EMBEDDED/validation, if there is one.
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  # "" if there is no EMBEDDED/test.
  config.data.test = "test"
  # The embedded images are not cropped or mirrored again.
  config.data.train_crop = "resize"
  config.data.flip = False
  config.cache.what = "features"
  config.epochs = -1.0
  config.eval_every = 100
  config.checkpoint_every = 100
  return config

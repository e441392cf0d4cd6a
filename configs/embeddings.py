"""Heads and probes from embeddings, without images.

  memory-vit embed --backbone=NPZ --input=DATA/train \\
    --output=EMBEDDED/train
  memory-vit embed --backbone=NPZ --input=DATA/test \\
    --output=EMBEDDED/test
  memory-vit train --config=embeddings --workdir=DIR \\
    --config.backbone=NPZ --config.data.dir=EMBEDDED

EMBEDDED may also be a single output of `embed`. It is then the split "train":
--config.data.train='train[:80%]', --config.data.validation='train[80%:90%]',
--config.data.test='train[90%:]'. --config.regime=probe uses all layers. The
task records the preprocessing of the embedded images. The default is 50 epochs,
but at least 25 steps; --config.epochs=N changes the number of epochs.
"""

import ml_collections

from memory_vit.configs import base


def get_config() -> ml_collections.ConfigDict:
  """A linear head on the outputs of a frozen backbone."""
  config = base.get_config()
  config.regime = "head"
  config.data.name = "embeddings"
  # Rows are in an order that mixes the classes, so the last tenth is a fair
  # sample. Set "validation" if there is a folder EMBEDDED/validation.
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  # Set "" if there is no folder EMBEDDED/test.
  config.data.test = "test"
  # Embeddings cannot be cropped or mirrored.
  config.data.train_crop = "resize"
  config.data.flip = False
  config.cache.what = "features"
  config.epochs = -1.0
  config.eval_every = 100
  config.checkpoint_every = 100
  return config

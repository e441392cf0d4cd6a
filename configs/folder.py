"""Your own images, one folder per class.

  memory-vit train --config=folder --workdir=DIR \\
    --config.data.dir=DATA

DATA/train/CLASS/ holds the images (jpg, jpeg, png, webp, bmp, gif) of a class,
and DATA/test/CLASS/ those for the result. A tenth of train/ is used for
validation. The default is 50 epochs: 106 steps for 300 images (270 for
training, 30 for validation), 1,800 for 5,120, and at least 25 steps;
--config.epochs=N changes it.
Time: not measured by us. The regime is the best on our test bed with some
thousand images (docs/choosing_a_regime.md of the repository). The paper's is
--config.regime=memory_masked, which needs another learning_rate.
"""

import ml_collections

from memory_vit.configs import base


def get_config() -> ml_collections.ConfigDict:
  """A short run on an image folder."""
  config = base.get_config()
  config.data.name = "folder"
  # The best learning rate depends on the images: one run trains several, by
  # --config.sweep.learning_rate="(0.01, 0.03, 0.1, 0.3, 1.0)".
  config.regime, config.learning_rate = "side_masked", 0.3
  # The files are in an order that mixes the classes, so the last tenth is a
  # fair sample. "validation" is a folder DATA/validation, if there is one.
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  # "" if there is no DATA/test.
  config.data.test = "test"
  # A quarter of the paper's batch, and about a quarter of the 205 epochs that
  # its 20,000 steps are on CIFAR-100.
  config.batch_size = 128
  config.epochs = -1.0
  config.eval_every = 100
  config.checkpoint_every = 100
  return config

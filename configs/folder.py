"""Your own images, one folder per class.

  memory-vit train --config=folder --workdir=DIR \\
    --config.data.dir=DATA

DATA/train/CLASS/ holds the images (jpg, jpeg, png, webp, bmp, gif) of a class,
and DATA/test/CLASS/ holds the test images. A tenth of train/ is used for
validation. The default is 50 epochs, but at least 25 steps: 106 steps for 300
images (270 for training, 30 for validation), and 1,800 steps for 5,120 images.
--config.epochs=N changes the number of epochs. We have not measured the time.
The regime `side_masked` is our test bed's best masked regime for thousands of
images (docs/choosing_a_regime.md of the repository). The paper's regime is
--config.regime=memory_masked, which needs another learning_rate.
"""

import ml_collections

from memory_vit.configs import base


def get_config() -> ml_collections.ConfigDict:
  """A short run on an image folder."""
  config = base.get_config()
  config.data.name = "folder"
  # The best learning rate depends on the images. One run can try several, with
  # --config.sweep.learning_rate="(0.01, 0.03, 0.1, 0.3, 1.0)".
  config.regime, config.learning_rate = "side_masked", 0.3
  # The files are in an order that mixes the classes, so the last tenth is a
  # fair sample. Set "validation" if there is a folder DATA/validation.
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  # Set "" if there is no folder DATA/test.
  config.data.test = "test"
  # A quarter of the paper's batch size, and 50 epochs: about a quarter of the
  # paper's 205 epochs (20,000 steps) on CIFAR-100.
  config.batch_size = 128
  config.epochs = -1.0
  config.eval_every = 100
  config.checkpoint_every = 100
  return config

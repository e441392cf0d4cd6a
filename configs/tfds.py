"""Any data set of TFDS that has images with one class each.

  memory-vit train --config=tfds:cifar10 --workdir=DIR

The name may have a configuration and a version. --config.data.dir=DATA reads a
data set that was prepared in DATA, also one that TFDS does not know. Time: not
measured by us.
"""

import ml_collections

from memory_vit.configs import base


def get_config(name: str = "") -> ml_collections.ConfigDict:
  """A short run on the data set `name`, which config.data.name may set."""
  config = base.get_config()
  config.data.name = name
  # Every data set has a "train"; many have no "test": give
  # --config.data.test=validation, or "" for none.
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  config.data.test = "test"
  # A tenth of the paper's, for data sets of some thousands of images.
  config.total_steps = 2_000
  config.eval_every = 200
  config.checkpoint_every = 200
  return config

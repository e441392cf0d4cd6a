"""Any TFDS data set of images with one class each.

  memory-vit train --config=tfds:cifar10 --workdir=DIR

The name may include a configuration and a version. --config.data.dir=DATA reads
a data set that was prepared in DATA, even if TFDS does not know it. We have not
measured the time.
"""

import ml_collections

from memory_vit.configs import base


def get_config(name: str = "") -> ml_collections.ConfigDict:
  """A short run on the data set `name`, or else on config.data.name."""
  config = base.get_config()
  config.data.name = name
  # Most data sets have the split "train", but many have no "test": set
  # --config.data.test to validation, or to "" for no test.
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  config.data.test = "test"
  # A tenth of the paper's steps, for data sets of a few thousand images.
  config.total_steps = 2_000
  config.eval_every = 200
  config.checkpoint_every = 200
  return config

"""A backbone trained from random weights (regime `full`) on any TFDS data set.

  memory-vit train --config=pretrain:cifar10 --workdir=DIR

DIR/NAME.npz is the backbone, in the layout of the published checkpoints; give
it as --config.backbone to a run that trains a task. Time and accuracy depend on
the data set and the ViT variant; we have not measured them.
"""

import ml_collections

from memory_vit.configs import tfds


def get_config(name: str = "") -> ml_collections.ConfigDict:
  """A ViT-Ti/16 at 64 px, with DeiT's settings but without its augmentation."""
  config = tfds.get_config(name)
  config.backbone = "random:Ti/16"
  config.regime = "full"
  config.image_size = 64
  config.batch_size = 512
  config.total_steps = 20_000
  config.eval_every = 1_000
  config.checkpoint_every = 1_000
  config.learning_rate = 1e-3
  config.optim.name = "adamw"
  config.optim.weight_decay = 0.05
  config.optim.warmup = 0.05
  config.optim.label_smoothing = 0.1
  return config

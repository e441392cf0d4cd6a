"""A backbone and a task, without a download: digits 0-4, then 5-9.

  memory-vit train --config=digits:backbone --workdir=runs/digits-backbone
  memory-vit train --config=digits --workdir=runs/digits
  memory-vit train --config=digits:sweep --workdir=DIR
  memory-vit train --config=digits:labels --workdir=runs/labels

The data are the 1,797 handwritten digits of scikit-learn. The first command
trains a micro ViT on 0 to 4, and writes it in the layout of the published
checkpoints, as runs/digits-backbone/low.npz; the other commands read it there,
or from --config.backbone. They freeze it, and learn the digits 5 to 9 with 5
memory cells per layer; 0 to 4 are evaluated before and after. Use it only for
demonstrations and tests: on these digits, logistic regression on the pixels
beats a ViT with 17 tokens.

With `:sweep`, six trials share every pass: 1 and 5 cells with three learning
rates. The best trial on validation is exported. With `:labels`, the task is to
predict of any digit, 0 to 9, whether it is even, above 4, or prime.

Hardware: 2 CPU cores. Time of each command: 25 s. Accuracy of the best trial of
the sweep on the digits 5 to 9: 82 %; mAP of the labels: 94 % (measured by us).
"""

import ml_collections

from memory_vit.configs import base
from memory_vit.errors import ConfigError

# A crop of 8 x 8 pixels has 4 positions in an image of 9 x 9 pixels.
_CROPS = 4


def get_config(what: str = "") -> ml_collections.ConfigDict:
  """A micro ViT/2 at 8 px; `what` may be "backbone", "sweep" or "labels"."""
  config = base.get_config()
  config.image_size = 8
  config.batch_size = 128
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  # A mirrored digit is not a digit.
  config.data.flip = False
  # Crop 8 of 9 pixels, at random in training and centrally in evaluation, so
  # that digits have the same scale in both.
  config.data.train_crop = "small"
  for data in (config.data, config.upstream):
    data.eval_crop, data.resize = "central", 9
  if what == "backbone":
    return _backbone(config)
  config.backbone = "runs/digits-backbone/low.npz"
  config.data.name = "digits:5-9"
  config.upstream.name = "digits:0-4"
  config.total_steps = 400
  config.learning_rate = 0.3
  config.eval_every = 200
  config.checkpoint_every = 200
  if what == "sweep":
    config.sweep.learning_rate = (1.0, 0.3, 0.1)
    config.sweep.cells = (1, 5)
    # Steps are fast if keys and values of the frozen backbone are cached.
    config.cache.what, config.cache.crops = "contexts", _CROPS
    config.log_images = 4
  elif what == "labels":
    config.data.name = "digits"
    config.task.kind = "labels"
  elif what:
    raise ConfigError(
      f"--config=digits:{what} is unknown, expected digits or one of "
      "digits:backbone, digits:sweep, digits:labels."
    )
  return config


def _backbone(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Set `config` to train a whole ViT on digits 0 to 4; return `config`."""
  config.backbone = "random:Micro/2"
  config.regime = "full"
  config.task.name = "low"
  config.data.name = "digits:0-4"
  config.data.train, config.data.validation = "train", ""
  config.data.test = ""
  config.total_steps = 200
  config.learning_rate = 3e-3
  config.optim.name, config.optim.warmup = "adamw", 0.1
  config.log_images = 0
  return config

"""Four regimes on a task far from pretraining, without a download.

  make quickstart
  memory-vit train --config=quickstart --workdir=runs/quickstart
  memory-vit train --config=quickstart:angle --workdir=runs/angle

The glyph ViT that comes with the package knows dark characters on light paper.
It stays frozen. The task is to classify 120 characters that are light on dark,
in heavy noise: with a linear head, a class token, memory, and a side stream,
each with two learning rates. Keys and values of the backbone are computed once.
The best trial of each regime on validation is exported. With `:angle`, the task
is to predict the rotation of a character, from -45 to 45 degrees.

Hardware: 2 CPU cores, 1 to 3 minutes. Accuracy: docs/reference/results.md of
the repository; R2 of the angle with a side stream: 0.33 (measured by us).
"""

import ml_collections

from memory_vit.configs import base
from memory_vit.errors import ConfigError


def get_config(what: str = "") -> ml_collections.ConfigDict:
  """Eight trials of 500 steps, with keys and values cached in memory."""
  config = base.get_config()
  config.backbone = "glyphs"
  config.image_size = 24
  config.batch_size = 64
  config.batch_size_eval = 360
  config.total_steps = 500
  config.eval_every = 250
  config.checkpoint_every = 250

  config.data.name = "glyphs:inverted"
  config.data.train = "train[:90%]"
  config.data.validation = "train[90%:]"
  # A mirrored or cropped character may be another character.
  config.data.flip = False
  config.data.train_crop = "resize"
  config.cache.what = "contexts"
  # Compare only the backbone's outputs before and after training. They have no
  # accuracy, because the backbone has 337 classes and the data has 120.
  config.upstream.name = "glyphs:inverted"

  config.sweep.regime = ("head", "cls_masked", "memory_masked", "side_masked")
  config.sweep.learning_rate = (1.0, 0.3)
  config.log_images = 8
  if what == "angle":
    config.data.name = "glyphs:angle"
    config.task.kind, config.task.units = "values", ("degrees",)
  elif what:
    raise ConfigError(
      f"--config=quickstart:{what} is unknown, expected quickstart or "
      "quickstart:angle."
    )
  return config

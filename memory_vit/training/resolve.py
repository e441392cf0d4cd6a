"""Settles what a configuration leaves to its backbone and to its data.

Both are settled once, when the backbone is loaded and the training split is
open. What a run records is the number that came of it.
"""

import dataclasses
import fractions
import logging
import math
import re
from pathlib import Path

from memory_vit.config import Config
from memory_vit.model.backbone import Backbone

logger = logging.getLogger(__name__)


def with_image_size(config: Config, backbone: Backbone) -> Config:
  """The configuration with the size at which its backbone was opened."""
  return dataclasses.replace(config, image_size=backbone.config.image_size)


def with_steps(config: Config, examples: int) -> Config:
  """The configuration with the steps that its epochs take, if it has any.

  Raises:
    ConfigError: where they are more steps than a run may have.
  """
  if not config.epochs:
    return config
  # As the number was written: in binary, 0.07 of 100 is a little more than 7.
  epochs = fractions.Fraction(str(config.epochs))
  steps = math.ceil(epochs * examples / config.batch_size)
  logger.info(
    "%g epochs of %d examples are %d steps of %d",
    config.epochs, examples, steps, config.batch_size,
  )  # fmt: skip
  return dataclasses.replace(config, total_steps=steps)


def task_name(config: Config) -> str:
  """The name of the task, after its data where none is given.

  "sun397/tfds" -> "sun397".
  """
  if config.task.name:
    return config.task.name
  data = config.data
  name = Path(data.dir).name if data.name == "folder" else data.name
  name = re.sub(r"[^a-z0-9_-]+", "-", name.split("/")[0].lower())
  return name.strip("-_")

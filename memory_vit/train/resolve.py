"""Settles what a configuration leaves to its backbone and to its data.

Both are settled once, when the backbone is loaded and the training split is
open. What a run records is the number that came of it.
"""

import dataclasses
import fractions
import logging
import math
import re
import unicodedata
from pathlib import Path
from typing import TypeVar

from memory_vit.config import Config, DataConfig, UpstreamConfig
from memory_vit.data.reader import Reader
from memory_vit.data.split_ref import OF_A_DIRECTORY
from memory_vit.errors import ConfigError
from memory_vit.model.backbone import Backbone

_Part = TypeVar("_Part", DataConfig, UpstreamConfig)

logger = logging.getLogger(__name__)


# What a configuration says that leaves something to its backbone.
_BACKBONE = "backbone"


def with_backbone(config: Config, backbone: Backbone) -> Config:
  """The configuration with what it left to its backbone.

  That is the size of images, the GELU, the compute dtype, and how images are
  prepared: the latter stays "backbone" where its source states something.
  """
  return dataclasses.replace(
    config,
    image_size=backbone.config.image_size,
    gelu=backbone.config.gelu,
    dtype=backbone.config.dtype,
    data=_with_crop(config.data, backbone),
    upstream=_with_crop(config.upstream, backbone),
  )


def _with_crop(part: _Part, backbone: Backbone) -> _Part:
  if part.eval_crop != _BACKBONE or backbone.evaluation:
    return part
  return dataclasses.replace(part, eval_crop="resize")


def with_embeddings(config: Config, train: Reader) -> Config:
  """The configuration with how the images of embeddings were prepared.

  Of other data it stays as it is.

  Raises:
    ConfigError: where it says that they are prepared otherwise.
  """
  if not train.source.embedded:
    return config
  made = train.source.embedded.origin.evaluation
  data = config.data
  if data.eval_crop == _BACKBONE:
    data = dataclasses.replace(data, eval_crop=made.crop, resize=made.resize)
  expected: dict[str, str | int] = {"eval_crop": made.crop}
  if made.resize:
    expected["resize"] = made.resize
  for key, value in expected.items():
    if getattr(data, key) != value:
      raise ConfigError(
        f"config.data.{key} is {getattr(data, key)!r}, and the embeddings were "
        f"made with {value!r}: expected that, or config.data.eval_crop "
        f"{_BACKBONE!r}, which takes over how they were made."
      )
  return dataclasses.replace(config, data=data)


def stated_gelu(config: Config) -> str | None:
  """The GELU of a configuration; None where it is left to the backbone."""
  return None if config.gelu == _BACKBONE else config.gelu


def made_gelu(config: Config) -> str:
  """The GELU of a backbone that is made with random weights."""
  return stated_gelu(config) or "tanh"


def with_steps(config: Config, examples: int) -> Config:
  """The configuration with the steps that its epochs take, if it has any.

  Raises:
    ConfigError: where they are more steps than a run may have.
  """
  if not config.epochs:
    return config
  steps = steps_of(config, examples)
  logger.info(
    "%g epochs of %d examples are %d steps of %d",
    config.epochs, examples, steps, config.batch_size,
  )  # fmt: skip
  return dataclasses.replace(config, total_steps=steps)


def steps_of(config: Config, examples: int) -> int:
  """Number of steps of a run with so many training examples."""
  if not config.epochs:
    return config.total_steps
  # As the number was written: in binary, 0.07 of 100 is a little more than 7.
  epochs = fractions.Fraction(str(config.epochs))
  return math.ceil(epochs * examples / config.batch_size)


def task_name(config: Config) -> str:
  """The name of the task, after its data where none is given.

  "sun397/tfds" -> "sun397".
  """
  if config.task.name:
    return config.task.name
  data = config.data
  name = Path(data.dir).name if data.name in OF_A_DIRECTORY else data.name
  # Letters without their accents: "März" -> "marz", "ß" -> "ss".
  name = unicodedata.normalize("NFKD", name.split("/")[0].casefold())
  name = "".join(c for c in name if not unicodedata.combining(c))
  name = re.sub(r"[^a-z0-9_-]+", "-", name)
  return name.strip("-_")

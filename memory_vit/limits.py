"""Which values the options may have: one rule for each, with its reason.

What no rule knows is no option. An upper bound is where nothing that is meant
can lie: what a machine has is compared by `run`, before anything is read.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Mapping
from typing import Any, Protocol

from memory_vit.errors import ConfigError
from memory_vit.model.regimes import REGIMES
from memory_vit.model.vit_config import (
  MAX_IMAGE_SIZE,
  MAX_RESIZE,
  RANDOM,
  VARIANTS,
  vit_config,
)
from memory_vit.runtime import messages


class Rule(Protocol):
  """What an option may be."""

  @property
  def expected(self) -> str:
    """What follows "expected" in a message, and stands in --help."""

  def accepts(self, value: Any) -> bool:
    """Whether a value of the right type may be."""


@dataclasses.dataclass(frozen=True)
class Number:
  """A number between two bounds.

  Attributes:
    least: it may be.
    most: it may be.
    why: the bounds are there, or what the number is.
    positive: whether `least`, 0, is too little itself.
    below: whether `most` is too much itself.
  """

  least: float
  most: float
  why: str
  positive: bool = False
  below: bool = False

  @property
  def expected(self) -> str:
    """See `Rule`."""
    if self.positive:
      return f"a positive number up to {self.most:,.0f} ({self.why})"
    last = "less than" if self.below else "at most"
    return f"at least {self.least:,} and {last} {self.most:,.0f} ({self.why})"

  def accepts(self, value: Any) -> bool:
    """See `Rule`."""
    # Of NaN every comparison is false.
    above = value > self.least if self.positive else value >= self.least
    return above and (value < self.most if self.below else value <= self.most)


@dataclasses.dataclass(frozen=True)
class OneOf:
  """One of some names."""

  names: tuple[str, ...]

  @property
  def expected(self) -> str:
    """See `Rule`."""
    return f"one of {list(self.names)}"

  def accepts(self, value: Any) -> bool:
    """See `Rule`."""
    return value in self.names


@dataclasses.dataclass(frozen=True)
class Text:
  """Text on one line, that may be a name, a path or an address.

  Attributes:
    what: it is.
    pattern: of the whole text.
    most: characters.
  """

  what: str
  pattern: str = ".+"
  most: int = 1_000

  @property
  def expected(self) -> str:
    """See `Rule`."""
    return f"{self.what}, at most {self.most:,} characters that can be printed"

  def accepts(self, value: Any) -> bool:
    """See `Rule`."""
    return (
      len(value) <= self.most
      and value.isprintable()
      and bool(re.fullmatch(self.pattern, value))
    )


@dataclasses.dataclass(frozen=True)
class Switch:
  """True or false."""

  expected: str = "true or false"

  def accepts(self, value: Any) -> bool:
    """See `Rule`."""
    return True


@dataclasses.dataclass(frozen=True)
class Items:
  """Several values, or none.

  Attributes:
    rule: of each.
    most: of them.
  """

  rule: Rule
  most: int

  @property
  def expected(self) -> str:
    """See `Rule`."""
    return f"at most {self.most:,} values, each {self.rule.expected}"

  def accepts(self, value: Any) -> bool:
    """See `Rule`."""
    return len(value) <= self.most and all(map(self.rule.accepts, value))


@dataclasses.dataclass(frozen=True)
class Changes:
  """Options and their values, or a name; whoever applies them checks each."""

  expected: str

  def accepts(self, value: Any) -> bool:
    """See `Rule`."""
    return isinstance(value, Mapping) or (
      isinstance(value, str) and _NAME.accepts(value)
    )


# Steps, and what is counted in them, are int32 in a training state.
_MOST_STEPS = 2**31 - 1
_STEPS = Number(1, _MOST_STEPS, "steps are counted in 32 bits")
_STEPS_OR_NONE = dataclasses.replace(_STEPS, least=0)
# Beyond, every update of float32 values overflows.
_RATE = Number(0, 1e6, "a learning rate", positive=True)
_FACTOR = Number(0, 1e6, "a factor")
_BATCH = Number(1, 2**20, "pictures of a batch")
_SEED = Number(0, 2**32 - 1, "jax uses 32 bits of a seed")
_CELLS = Number(
  0, 4_096, "with more, a task of a ViT-H is beyond the 1 GiB of a saved task"
)
_GIB = Number(0, 2**20, "GiB of memory")
_RESIZE = Number(0, MAX_RESIZE, "pixels")
_NAME = Text("a data set", r"[\w.,:/+-]+", 200)
_NAME_OR_NONE = Text('a data set, or ""', r"[\w.,:/+-]*", 200)
_DIRECTORY = Text('a directory, or ""', ".*", 4_000)
_SPLIT = Text("a split of TFDS")
_SPLIT_OR_NONE = Text('a split of TFDS, or ""', ".*")
_TRAIN_CROP = OneOf(("inception", "small"))
_EVAL_CROP = OneOf(("resize", "central"))
_TASKS = Items(Text("the directory of a task", ".+", 4_000), 1_000)
# All combinations of them are compared with each other.
MOST_VARIANTS = 1_000

_TRAIN_DATA = {
  "name": _NAME_OR_NONE,
  "dir": _DIRECTORY,
  "train": _SPLIT,
  "train_crop": _TRAIN_CROP,
  "flip": Switch(),
  "resize": _RESIZE,
  "seed": dataclasses.replace(_SEED, least=-1),
  "cache_gib": _GIB,
  "max_bad": Number(0, 2**31 - 1, "examples of a split"),
}

# {option: what it may be}.
RULES: Mapping[str, Rule] = {
  "backbone": Text("a short name, a file, an address or random:B/32", ".+",
                   4_000),
  "gelu": OneOf(("tanh", "exact")),
  "image_size": Number(0, MAX_IMAGE_SIZE, "pixels"),
  "dtype": OneOf(("float32", "bfloat16")),
  "batch_size": _BATCH,
  "batch_size_eval": _BATCH,
  "total_steps": _STEPS,
  "epochs": Number(0, 1e6, "passes over the training split"),
  "learning_rate": _RATE,
  "seed": _SEED,
  "regime": OneOf(tuple(REGIMES)),
  "eval_every": _STEPS,
  "checkpoint_every": _STEPS,
  "log_every": _STEPS,
  "profile_at": _STEPS_OR_NONE,
  "stall_timeout": Number(0, 2_592_000, "seconds, up to 30 days"),
  "trust_data_code": Switch(),
  **{f"data.{key}": rule for key, rule in _TRAIN_DATA.items()},
  "data.validation": _SPLIT_OR_NONE,
  "data.test": _SPLIT_OR_NONE,
  "data.eval_crop": _EVAL_CROP,
  "data.digest": OneOf(("files", "contents")),
  "task.name": Text('a name such as pets-2, or ""',
                    r"([a-z0-9][a-z0-9_-]*)?", 64),
  "task.cells": _CELLS,
  "task.bottleneck": Number(1, 1_280, "no wider than the tokens of a ViT-H"),
  "task.attends_to": _TASKS,
  "task.indirect": _TASKS,
  "task.memory_norm": Switch(),
  "task.memory_std": Number(0, 1e6, "a standard deviation", positive=True),
  "task.cls_init": OneOf(("pretrained", "normal")),
  "optim.name": OneOf(("sgd", "adamw")),
  "optim.momentum": Number(0, 1, "with 1, no gradient is ever forgotten",
                           below=True),
  "optim.weight_decay": _FACTOR,
  "optim.grad_clip": Number(0, 1e6, "a norm"),
  "optim.clip_by": OneOf(("task", "part")),
  "optim.cls_factor": _FACTOR,
  "optim.memory_factor": _FACTOR,
  "optim.warmup": Number(0, 1, "a share of the steps"),
  "optim.warmup_steps": _STEPS_OR_NONE,
  "optim.schedule": OneOf(("cosine", "constant")),
  "optim.label_smoothing": Number(0, 1, "a probability", below=True),
  "optim.max_skipped": _STEPS,
  "optim.accumulation_steps": Number(1, 2**20, "parts of a batch"),
  "sweep.learning_rate": Items(_RATE, MOST_VARIANTS),
  "sweep.cells": Items(_CELLS, MOST_VARIANTS),
  "sweep.seed": Items(_SEED, MOST_VARIANTS),
  "sweep.overrides": Items(
    Changes('a dictionary such as {"optim.momentum": 0.8}'), MOST_VARIANTS
  ),
  "sweep.export": OneOf(("best", "all")),
  "sweep.memory_gib": _GIB,
  "upstream.name": _NAME_OR_NONE,
  "upstream.dir": _DIRECTORY,
  "upstream.split": _SPLIT,
  "upstream.eval_crop": _EVAL_CROP,
  "upstream.resize": _RESIZE,
  "pretrain.variant": Text('a variant such as "Micro/2", or ""',
                           rf"(({'|'.join(VARIANTS)})/[1-9][0-9]{{0,3}})?"),
  **{f"pretrain.data.{key}": rule for key, rule in _TRAIN_DATA.items()},
  "pretrain.total_steps": _STEPS_OR_NONE,
  "pretrain.batch_size": _BATCH,
  "pretrain.learning_rate": _RATE,
  "study.learning_rates": Items(_RATE, MOST_VARIANTS),
  "study.seeds": Items(_SEED, MOST_VARIANTS),
  "study.search": OneOf(("first", "all")),
  "study.regimes": Items(OneOf(tuple(REGIMES)), len(REGIMES)),
  "study.cells": Items(dataclasses.replace(_CELLS, least=1), MOST_VARIANTS),
  "study.others": Items(
    Changes('a data set, or a dictionary such as {"name": "pets"}'),
    MOST_VARIANTS,
  ),
  "mesh.fsdp": Number(1, 2**20, "devices"),
}  # fmt: skip


def problems(config: Any) -> list[str]:
  """What is wrong with the values of a `config.Config`, one line each."""
  lines = problems_of(config, "", "config")
  # Of values that are possible alone.
  return lines or [*_of_training(config), *_of_making(config)]


def problems_of(values: Any, part: str, where: str) -> list[str]:
  """What is wrong with the values of one part, each seen alone.

  Args:
    values: a dataclass of `config`.
    part: which one, "data." for instance; "" is all.
    where: what to call it in a message.
  """
  lines = []
  for key, rule in RULES.items():
    name = key.removeprefix(part)
    if not key.startswith(part) or ("." in name and part):
      continue
    value = operator.attrgetter(name)(values)
    if rule.accepts(value):
      continue
    if isinstance(rule, Items) and len(value) <= rule.most:
      rule = rule.rule
      wrong = [i for i, item in enumerate(value) if not rule.accepts(item)]
      name, value = f"{name}[{wrong[0]}]", value[wrong[0]]
    lines.append(
      f"{where}.{name} is {messages.brief(value)}, expected {rule.expected}."
    )
  return lines


def _of_training(config: Any) -> list[str]:
  """Options that contradict each other, in how a task is trained."""
  lines = []
  if config.batch_size % config.optim.accumulation_steps:
    lines.append(
      f"config.batch_size {config.batch_size} does not divide into "
      f"config.optim.accumulation_steps {config.optim.accumulation_steps}."
    )
  if config.optim.name == "sgd" and config.optim.weight_decay:
    lines.append(
      f"config.optim.weight_decay is {config.optim.weight_decay}, which 'sgd' "
      "does not use: expected 0, or config.optim.name 'adamw'."
    )
  if not config.epochs:
    lines += beyond_the_end(config)
  sweep = config.sweep
  count = math.prod(
    max(1, len(values))
    for values in (
      sweep.learning_rate, sweep.cells, sweep.seed, sweep.overrides
    )
  )  # fmt: skip
  if count > MOST_VARIANTS:
    lines.append(
      f"config.sweep has {count} combinations, expected at most "
      f"{MOST_VARIANTS}."
    )
  return lines


def _of_making(config: Any) -> list[str]:
  """The same of a backbone that the run makes itself."""
  variant, lines = config.pretrain.variant, []
  if variant and config.pretrain.total_steps < 1:
    lines.append(
      f"config.pretrain.total_steps is {config.pretrain.total_steps}, expected "
      "at least 1 to train a backbone."
    )
  if not variant and config.backbone.startswith(RANDOM):
    variant = config.backbone.removeprefix(RANDOM)
  if variant and not config.image_size:
    lines.append(
      "config.image_size is 0, the size of the backbone, which has none before "
      "it is made: expected a number of pixels for "
      f"{config.pretrain.variant or config.backbone!r}."
    )
  elif variant:
    try:
      vit_config(variant, image_size=config.image_size)
    except ConfigError as error:
      lines.append(f"config: {error}")
  return lines


def beyond_the_end(config: Any) -> list[str]:
  """What would come after the last step, once `total_steps` is known."""
  return [
    f"config.{key} is {value}, beyond config.total_steps {config.total_steps}."
    for key, value in (
      ("profile_at", config.profile_at),
      ("optim.warmup_steps", config.optim.warmup_steps),
    )
    if value > config.total_steps
  ]

"""The configuration of a run: every option, its default, and what it means.

The defaults are those of the paper where it states one. `configs/base.py` turns
this tree into an `ml_collections.ConfigDict`, the only form in which it can be
changed; `from_dict` turns that back, and refuses what it does not know.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from memory_vit import records
from memory_vit.errors import ConfigError

REGIMES = ("memory_masked",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """The data set of a task, and how its pictures are prepared."""

  # A TFDS name ("cifar100", "sun397/tfds"), "folder", or "digits:0-4".
  name: str = ""
  # TFDS data directory, or the folder that holds train/ and test/; "" is TFDS's
  # own default directory.
  dir: str = ""
  # Splits, in the notation of TFDS: "train[:98%]".
  train: str = "train[:98%]"
  # On which the best step is chosen; "" keeps the last step instead.
  validation: str = "train[98%:]"
  # On which the result is reported; "" reports none.
  test: str = "test"
  # "inception": a random part of the picture (area 5-100 %, aspect 3/4-4/3);
  # "small": the shorter side to `resize` pixels, then a random square.
  train_crop: str = "inception"
  # Mirror half of the training pictures; wrong for digits and letters.
  flip: bool = True
  # "resize": the whole picture squeezed into the square, as vit_jax evaluates;
  # "central": the shorter side to `resize` pixels, then the middle.
  eval_crop: str = "resize"
  # The shorter side before a "small" or "central" crop, in pixels; 0 is 8/7 of
  # image_size (256 for 224).
  resize: int = 0
  # Data sets without random access are read into memory, as encoded pictures;
  # larger ones (GiB) are refused with a word on how to convert them.
  cache_gib: float = 16.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
  """The task that is learned."""

  # "" takes the name of the data set.
  name: str = ""
  # Memory cells per layer; 0 learns the class token and the head alone.
  cells: int = 5
  # Directories of earlier tasks that this one reads (model extension). They
  # stay as they are.
  attends_to: tuple[str, ...] = ()
  # The paper: memory passes the block's first LayerNorm (Figure 2).
  memory_norm: bool = True
  # "pretrained" starts the class token as a copy of the original one, "normal"
  # at N(0, 0.02^2).
  cls_init: str = "pretrained"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
  """The optimiser; each task has its own."""

  # "sgd" (the paper's) or "adamw".
  name: str = "sgd"
  momentum: float = 0.9
  # Decoupled, for "adamw" alone.
  weight_decay: float = 0.0
  # Global norm to which the gradient of a task is clipped; 0 does not clip. The
  # paper clips and states no value; 1.0 is vit_jax's.
  grad_clip: float = 1.0
  # Linear warm-up, as a share of the steps. The paper has one and states no
  # length; this is vit_jax's 500 of 20,000.
  warmup: float = 0.025
  # After warm-up: "cosine" to zero (vit_jax's choice; unstated in the paper) or
  # "constant".
  schedule: str = "cosine"
  label_smoothing: float = 0.0
  # A batch goes through the model in so many parts, to save memory.
  accumulation_steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpstreamConfig:
  """The original task of the backbone, to show that it is unchanged."""

  # As `data.name`; "" evaluates nothing.
  name: str = ""
  dir: str = ""
  split: str = "test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
  """Makes a backbone first, from random weights; for demonstrations."""

  # For example "Micro/2"; "" loads `backbone` instead.
  variant: str = ""
  data: DataConfig = DataConfig()
  total_steps: int = 0
  batch_size: int = 128
  learning_rate: float = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run: learn one task on one backbone."""

  # A published checkpoint by short name ("i21k-B/32"), or the path or address
  # of an .npz file.
  backbone: str = "i21k-B/32"
  # "tanh" as vit_jax and big_vision train; "exact" for weights from PyTorch.
  gelu: str = "tanh"
  image_size: int = 224
  # Of the computation: "float32" or "bfloat16". Parameters stay float32.
  dtype: str = "float32"
  batch_size: int = 512
  batch_size_eval: int = 512
  total_steps: int = 20_000
  # The peak. The paper reports the best of several for each data set, and names
  # none: try 0.03 to 0.3.
  learning_rate: float = 0.1
  seed: int = 0
  # What is trained, and how attention runs.
  regime: str = "memory_masked"
  # Steps between evaluations on data.validation, between saved states, and
  # between progress lines.
  eval_every: int = 1_000
  checkpoint_every: int = 1_000
  log_every: int = 50
  # Step at which a profile of 5 steps is taken, for TensorBoard; 0 takes none.
  profile_at: int = 0
  data: DataConfig = DataConfig()
  task: TaskConfig = TaskConfig()
  optim: OptimConfig = OptimConfig()
  upstream: UpstreamConfig = UpstreamConfig()
  pretrain: PretrainConfig = PretrainConfig()

  def __post_init__(self) -> None:
    for problem in _problems(self):
      raise ConfigError(problem)


def _problems(config: Config) -> list[str]:
  """What is wrong with the values of a configuration, one line each."""
  choices = {
    "regime": (config.regime, REGIMES),
    "dtype": (config.dtype, ("float32", "bfloat16")),
    "gelu": (config.gelu, ("tanh", "exact")),
    "optim.name": (config.optim.name, ("sgd", "adamw")),
    "optim.schedule": (config.optim.schedule, ("cosine", "constant")),
    "data.train_crop": (config.data.train_crop, ("inception", "small")),
    "data.eval_crop": (config.data.eval_crop, ("resize", "central")),
    "task.cls_init": (config.task.cls_init, ("pretrained", "normal")),
  }
  lines = [
    f"config.{key} is {value!r}, expected one of {list(allowed)}."
    for key, (value, allowed) in choices.items()
    if value not in allowed
  ]
  positive = ("image_size", "batch_size", "batch_size_eval", "total_steps",
              "eval_every", "checkpoint_every", "log_every")  # fmt: skip
  lines += [
    f"config.{key} is {getattr(config, key)}, expected at least 1."
    for key in positive
    if getattr(config, key) < 1
  ]
  if not (math.isfinite(config.learning_rate) and config.learning_rate > 0):
    lines.append(
      f"config.learning_rate is {config.learning_rate}, expected a positive "
      "number."
    )
  if config.optim.accumulation_steps < 1 or (
    config.batch_size % config.optim.accumulation_steps
  ):
    lines.append(
      f"config.batch_size {config.batch_size} does not divide into "
      f"config.optim.accumulation_steps {config.optim.accumulation_steps}."
    )
  if not 0 <= config.optim.warmup <= 1:
    lines.append(
      f"config.optim.warmup is {config.optim.warmup}, expected a share of the "
      "steps, from 0 to 1."
    )
  if config.pretrain.variant and config.pretrain.total_steps < 1:
    lines.append(
      f"config.pretrain.total_steps is {config.pretrain.total_steps}, expected "
      "at least 1 to train a backbone."
    )
  if config.task.cells < 0:
    lines.append(f"config.task.cells is {config.task.cells}, expected >= 0.")
  return lines


def from_dict(values: Mapping[str, Any]) -> Config:
  """A nested dictionary -> `Config`.

  Raises:
    ConfigError: for a missing or an unknown key, or a value of another type.
  """
  return records.build(Config, values, "config", ConfigError)


def to_dict(config: Config) -> dict[str, Any]:
  """`Config` -> nested dictionary of numbers, strings and tuples."""
  return dataclasses.asdict(config)

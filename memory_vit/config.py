"""The configuration of a run: every option, its default, and what it means.

The defaults are those of the paper where it states one; the size of pictures is
left to the backbone. `configs/base.py` turns this tree into an
`ml_collections.ConfigDict`, the only form in which it can be changed;
`from_dict` turns that back, and refuses what it does not know.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from memory_vit import limits
from memory_vit.errors import ConfigError
from memory_vit.model.vit_config import RANDOM as RANDOM
from memory_vit.runtime import schema


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainDataConfig:
  """A data set to train on, and how its pictures are prepared."""

  # A TFDS name ("cifar100", "sun397/tfds"), "folder", or "digits:0-4".
  name: str = ""
  # TFDS data directory, or the folder that holds train/ and test/; "" is TFDS's
  # own default directory.
  dir: str = ""
  # Splits, in the notation of TFDS: "train[:98%]".
  train: str = "train[:98%]"
  # "inception": a random part of the picture (area 5-100 %, aspect 3/4-4/3);
  # "small": the shorter side to `resize` pixels, then a random square.
  train_crop: str = "inception"
  # Mirror half of the training pictures; wrong for digits and letters.
  flip: bool = True
  # The shorter side before a "small" or "central" crop, in pixels; 0 is 8/7 of
  # image_size (256 for 224).
  resize: int = 0
  # Of the order of the training pictures, and of their crops; -1 is that of the
  # run. The variants of a sweep share their batches, whatever their seeds.
  seed: int = -1
  # Data sets without random access are read into memory, as encoded pictures;
  # larger ones (GiB) are refused with a word on how to convert them.
  cache_gib: float = 16.0
  # So many examples of a split may be left out as they cannot be read; one more
  # ends the run. In training the next readable one takes their place; they do
  # not count in evaluation, and the result says how many they were. Those of
  # all processes count together whenever a state is saved.
  max_bad: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(TrainDataConfig):
  """The data set of a task: what it is trained on, and evaluated."""

  # By what a run that goes on knows its data: "files" (names, sizes and times
  # of the last change) or "contents" (SHA-256 of all bytes, which reads all of
  # them at every start). Of TFDS sets what TFDS recorded counts as well. May
  # change when a run goes on: it is compared as its state was saved.
  digest: str = "files"
  # On which the best step is chosen; "" keeps the last step instead.
  validation: str = "train[98%:]"
  # On which the result is reported; "" reports none.
  test: str = "test"
  # "resize": the whole picture squeezed into the square, as vit_jax evaluates;
  # "central": the shorter side to `resize` pixels, then the middle.
  eval_crop: str = "resize"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
  """The task that is learned."""

  # "" takes the name of the data set.
  name: str = ""
  # Memory cells per layer, in the regimes that have memory.
  cells: int = 5
  # Width of adapters, in the regimes that have some (the paper's).
  bottleneck: int = 5
  # Directories of earlier tasks that this one reads (model extension). They
  # stay as they are.
  attends_to: tuple[str, ...] = ()
  # Directories of tasks that those of `attends_to` read, and this one does not.
  indirect: tuple[str, ...] = ()
  # The paper: memory passes the block's first LayerNorm (Figure 2).
  memory_norm: bool = True
  # Memory is drawn from N(0, memory_std^2); 0.02 is the paper's. With
  # memory_norm its scale does not matter for what the model computes, but a
  # larger one makes it learn more slowly and evenly: the gradient is
  # proportional to 1 / memory_std.
  memory_std: float = 0.02
  # "pretrained" starts the class token as a copy of the original one, "normal"
  # at N(0, 0.02^2), as memory starts. The copy is our choice: of the paper we
  # know that it learns a new class token, not where that starts.
  cls_init: str = "pretrained"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
  """The optimiser; each task has its own."""

  # "sgd" (the paper's) or "adamw".
  name: str = "sgd"
  # Of "sgd".
  momentum: float = 0.9
  # Decoupled, for "adamw" alone.
  weight_decay: float = 0.0
  # Global norm to which the gradient of a task is clipped; 0 does not clip. The
  # paper clips and states no value; 1.0 is vit_jax's.
  grad_clip: float = 1.0
  # The norm of what is clipped: of a whole "task", or of each "part" of it
  # (head, cls, memory, ...) alone. The gradient of memory is much larger than
  # that of the head, and uses up a clip that they share.
  clip_by: str = "task"
  # Factor on the learning rate of the class token.
  cls_factor: float = 1.0
  # Factor on the learning rate of memory.
  memory_factor: float = 1.0
  # Linear warm-up, as a share of the steps, to the nearest whole number. It is
  # vit_jax's 500 of 20,000, and does not count where `warmup_steps` is given.
  warmup: float = 0.025
  # Linear warm-up in steps; 0 leaves its length to `warmup`. The configurations
  # of the paper's four data sets say 5, as its public PyTorch reproduction
  # reports of the paper, whose own text we could not check.
  warmup_steps: int = 0
  # After warm-up: "cosine" to zero (vit_jax's choice; unstated in the paper) or
  # "constant".
  schedule: str = "cosine"
  # So much of the probability is spread over all classes.
  label_smoothing: float = 0.0
  # An update that is not finite is skipped; after so many in a row, training of
  # that task stops.
  max_skipped: int = 3
  # A batch goes through the model in so many parts, to save memory.
  accumulation_steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpstreamConfig:
  """The original task of the backbone, to show that it is unchanged."""

  # As `data.name`; "" evaluates nothing.
  name: str = ""
  # As `data.dir`.
  dir: str = ""
  # On which the backbone is evaluated, before training and after it.
  split: str = "test"
  # As `data.eval_crop`.
  eval_crop: str = "resize"
  # As `data.resize`.
  resize: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
  """Makes a backbone first, from random weights; for demonstrations."""

  # For example "Micro/2"; "" loads `backbone` instead.
  variant: str = ""
  data: TrainDataConfig = TrainDataConfig()
  # Steps of this training.
  total_steps: int = 0
  # Pictures in a step of it.
  batch_size: int = 128
  # The peak, for AdamW.
  learning_rate: float = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
  """Variants of the task, learned in one pass over the same batches.

  Every combination of the lists, for each of `overrides`, is a variant. All
  empty: no sweep.
  """

  # Values of `learning_rate`.
  learning_rate: tuple[float, ...] = ()
  # Values of `task.cells`.
  cells: tuple[int, ...] = ()
  # Of the first values of a task; the batches are the same for all.
  seed: tuple[int, ...] = ()
  # Dictionaries such as {"optim.momentum": 0.8, "task.memory_norm": False}. Of
  # `task` and `optim` all can vary but what all variants share.
  overrides: tuple[dict[str, Any], ...] = ()
  # "best" exports the variant that is best on validation, as task.name; "all"
  # the others too, as task.name-00, -01, ...
  export: str = "best"
  # Where not all variants fit into so much memory (GiB), they are trained in
  # several passes; 0 is what is free.
  memory_gib: float = 0.0

  @property
  def is_on(self) -> bool:
    """Whether there is anything to vary."""
    return bool(self.learning_rate or self.cells or self.seed or self.overrides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
  """The paper's study, which `memory_vit.paper` runs; see `study`."""

  # Of every regime, the one that is best on validation is reported. The paper
  # names none; these reach as far as full fine-tuning is said to break down.
  learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
  # Each is a run with its own first values and its own order of the pictures.
  seeds: tuple[int, ...] = (0, 1, 2)
  # Of regimes that cost a run for each rate: "first" tries all rates with the
  # first seed and runs further seeds at the best one alone; "all" tries all
  # rates with all seeds. The others try all in one pass, whatever is said here.
  search: str = "first"
  # Regimes that are run; () is all that the parts of the study need. Tables
  # leave out the others.
  regimes: tuple[str, ...] = ()
  # Memory cells per layer (the paper's); `task.cells` must be among them, which
  # is what is compared where the number does not vary.
  cells: tuple[int, ...] = (1, 5, 10, 20)
  # Further data sets, for interference and extension: a name, or a dictionary
  # such as {"name": "places365_small", "test": "validation"} of options of
  # `data`. What is not said is as in `data`.
  others: tuple[str | dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """How the devices share the work; a batch is always split over all."""

  # Over how many devices the backbone is split, for one that is too large for
  # a device; it divides their number. With 1 each device has all of it.
  fsdp: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run: learn one task on one backbone, or a sweep over its variants."""

  # A published checkpoint by short name ("i21k-B/32"), the path or address of
  # an .npz file, or random weights ("random:Ti/16"), to train from scratch.
  backbone: str = "i21k-B/32"
  # "tanh" as vit_jax and big_vision train; "exact" for weights from PyTorch.
  gelu: str = "tanh"
  # Side of the square pictures that the model gets, in pixels; 0 is the
  # backbone's own. For another one the position embedding is resized. Random
  # weights ("random:...", `pretrain`) have no size of their own: they need one.
  image_size: int = 0
  # Of the computation: "float32" or "bfloat16". Parameters stay float32.
  dtype: str = "float32"
  # Pictures in a step, over all devices.
  batch_size: int = 512
  # Pictures in a batch of an evaluation.
  batch_size_eval: int = 512
  # Steps of training, where `epochs` is 0.
  total_steps: int = 20_000
  # How often each example of `data.train` is seen, 2.5 for instance. Above 0,
  # total_steps is what that takes, rounded up, and is recorded as that number.
  epochs: float = 0.0
  # The peak. The paper reports the best of several for each data set, and names
  # none: try 0.03 to 0.3.
  learning_rate: float = 0.1
  # Of the first values, and of the order of the pictures.
  seed: int = 0
  # What is trained, and how attention runs: see `regimes`.
  regime: str = "memory_masked"
  # Steps between evaluations on data.validation. The last step is evaluated
  # whatever is said here: a shorter run, also of few `epochs`, at that alone.
  eval_every: int = 1_000
  # Steps between saved states. The last step is saved whatever is said here.
  checkpoint_every: int = 1_000
  # Steps between progress lines.
  log_every: int = 50
  # Step at which a profile of 5 steps is taken, for TensorBoard; 0 takes none.
  profile_at: int = 0
  # Seconds to wait for a batch of pictures. Then what the process was doing is
  # written to stderr and it ends, with status 74; 0 waits for ever.
  stall_timeout: float = 600.0
  # Whether data sets may name code of their own, which is then run: classes of
  # features outside of TFDS, and TFDS names with a namespace. Also
  # --trust_data_code.
  trust_data_code: bool = False
  data: DataConfig = DataConfig()
  task: TaskConfig = TaskConfig()
  optim: OptimConfig = OptimConfig()
  sweep: SweepConfig = SweepConfig()
  upstream: UpstreamConfig = UpstreamConfig()
  pretrain: PretrainConfig = PretrainConfig()
  study: StudyConfig = StudyConfig()
  mesh: MeshConfig = MeshConfig()

  def __post_init__(self) -> None:
    for problem in limits.problems(self):
      raise ConfigError(problem)


def data_seed(config: Config) -> int:
  """The seed of the training pictures' order and crops."""
  return config.seed if config.data.seed < 0 else config.data.seed


def from_dict(values: Mapping[str, Any]) -> Config:
  """A nested dictionary -> `Config`.

  Raises:
    ConfigError: for a missing or an unknown key, or a value of another type.
  """
  return schema.build(Config, values, "config", ConfigError)


def to_dict(config: Config) -> dict[str, Any]:
  """`Config` -> nested dictionary of numbers, strings and tuples."""
  return dataclasses.asdict(config)

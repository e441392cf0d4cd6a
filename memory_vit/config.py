"""Configuration of a run: every option, its default, meaning and rules.

Defaults are the paper's if it states one. --help shows the comment above an
option. The rules of an option say which values it accepts, whether it may
change when a run resumes (`resume`), and whether trials of a sweep may differ
in it (`sweep`).
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from memory_vit.errors import ConfigError
from memory_vit.kinds import KINDS
from memory_vit.model.parts.side import SIDE_MIXING
from memory_vit.model.regimes import (
  REGIMES,
  Regime,
  get_regime,
  is_regime,
  listed_parts,
)
from memory_vit.model.vit_config import (
  MAX_IMAGE_SIZE,
  MAX_RESIZE,
  RANDOM,
  vit_config,
)
from memory_vit.runtime import dtypes, options, schema
from memory_vit.runtime.messages import brief
from memory_vit.runtime.options import (
  Changes,
  Choice,
  Items,
  Number,
  Switch,
  Text,
  option,
)

# `data.name` of embeddings that `memory-vit embed` wrote.
EMBEDDINGS = "embeddings"
# Maximum number of trials of a sweep, which compares all pairs of its trials.
MOST_TRIALS = 1_000
# Values of `optim.name` for which a head is solved in one step, not trained.
CLOSED_FORMS = tuple(
  dict.fromkeys(name for kind in KINDS.values() for name in kind.closed_forms)
)
# Learning rates to try for a new task; the paper lists no learning rates.
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# On our test bed, choosing one of these three rates on validation images is as
# good as choosing one of all six `LEARNING_RATES` (docs/choosing_a_regime.md).
FEW_LEARNING_RATES = (0.03, 0.3, 1.0)


@dataclasses.dataclass(frozen=True)
class _RegimeName(Choice):
  names: tuple[str, ...] = tuple(REGIMES)

  @property
  def expected(self) -> str:
    return (
      f"{super().expected}, or, for another combination, cls and some of "
      f"{', '.join(listed_parts()[1:])} in this order, such as "
      "'cls+memory+side'"
    )

  def accepts(self, value: Any) -> bool:
    return is_regime(value)


_STEPS = Number(1, 2**31 - 1, "steps are counted in 32 bits")
_STEPS_OR_NONE = dataclasses.replace(_STEPS, least=0)
_RATE = Number(0, 1e6, "a learning rate", positive=True)
_RATES = Items(_RATE, MOST_TRIALS)
_FACTOR = Number(0, 1e6, "a factor")
MOST_IMAGES = 2**20
_BATCH = Number(1, MOST_IMAGES, "images of a batch")
_SEED = Number(0, 2**32 - 1, "jax uses 32 bits of a seed")
_SEEDS = Items(_SEED, MOST_TRIALS)
_CELLS = Number(
  0, 4_096, "with more, a saved task of a ViT-H would exceed its limit of 1 GiB"
)
_GIB = Number(0, 2**20, "GiB of memory")
_RESIZE = Number(0, MAX_RESIZE, "pixels")
_EXAMPLES = Number(0, 2**31 - 1, "examples of a split")
_DATA_SET_OR_NONE = Text('a data set, or ""', r"[\w.,:/+-]*", 200)
_DIRECTORY = Text('a directory, or ""', ".*", 4_000)
_SPLIT = Text("a split of TFDS")
_SPLIT_OR_NONE = Text('a split of TFDS, or ""', ".*")
_EVAL_CROP = Choice(("backbone", "resize", "central", "central_rounded"))
_PROJECT = Text('a project or entity of W&B, or ""', r"[^/\\#?%:]*", 128)
_LABEL = Text('a name, or ""', ".*", 128)
_TASKS = Items(Text("the directory of a task", ".+", 4_000), 1_000)
_REGIME = _RegimeName()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """The data set of a task: its splits, and how images are prepared."""

  # Name of a TFDS data set ("cifar100", "sun397/tfds"), "folder", "list",
  # "embeddings", or built-in data: "digits:0-4", "glyphs:inverted".
  name: str = option("", _DATA_SET_OR_NONE)
  # Directory of the data. If `name` is "folder", the directory holds train/ and
  # test/; if it is "list", train.txt and test.txt; if "embeddings", train/. A
  # single output directory of `memory-vit embed` is used as the split "train".
  # For TFDS, "" is the default directory.
  dir: str = option("", _DIRECTORY, resume="free")
  # Training split, in the notation of TFDS: "train[:98%]".
  train: str = option("train[:98%]", _SPLIT)
  # Crop of a training image. "inception": a random part (area 5-100 %, aspect
  # ratio 3/4-4/3). "small": a random square, after the shorter side is resized
  # to `resize` pixels. "resize": the whole image squeezed to a square.
  train_crop: str = option(
    "inception", Choice(("inception", "small", "resize")), resume="recorded"
  )
  # Mirror half of the training images at random; wrong for digits and letters.
  flip: bool = option(True, Switch(), resume="recorded")
  # Pixels to which the shorter side is resized before the crop "small" or
  # "central"; 0 is 8/7 of image_size (256 for 224).
  resize: int = option(0, _RESIZE, resume="recorded")
  # Random seed for the order and crops of training images; -1 takes
  # `config.seed`. All trials of a sweep share batches: `sweep.seed` changes
  # only their initialization.
  seed: int = option(-1, dataclasses.replace(_SEED, least=-1))
  # Maximum size (GiB) of a data set whose files have no random access: all
  # its encoded images are read into memory. The error for a larger data set
  # says how to convert its files.
  cache_gib: float = option(16.0, _GIB, resume="free")
  # Maximum number of unreadable examples to skip per split before the run
  # fails. The counts of several processes are added whenever a state is saved.
  # Training uses the next readable example instead; evaluation skips and counts
  # unreadable examples.
  max_bad: int = option(0, _EXAMPLES, resume="free")
  # How a resumed run verifies that its data is unchanged: "files" (names, sizes
  # and modification times) or "contents" (SHA-256 of all bytes, read at every
  # start). Metadata that TFDS recorded is compared as well. This option may
  # change when a run is resumed.
  digest: str = option("files", Choice(("files", "contents")), resume="free")
  # What to learn. If a TFDS data set has several labels: name of a feature, or
  # one of VTAB's labels ("clevr_count", "clevr_distance", "kitti_distance",
  # "dsprites_x", "dsprites_orientation", "smallnorb_azimuth" or
  # "smallnorb_elevation"). For a table (CSV or Parquet): name of a column,
  # "label" by default. If task.kind is "labels" or "values", several names may
  # be given, separated by commas.
  label: str = option("", Text('a feature of the data set, or ""', ".*", 200))
  # Column of a table (CSV or Parquet) that holds the paths of the images; "" is
  # "path".
  path: str = option(
    "", Text('a column of a table, or ""', ".*", 200), resume="free"
  )
  # Number of training images per class, chosen at random from `train` by
  # `seed`; 0 takes all. A class with fewer images is an error.
  per_class: int = option(0, _EXAMPLES)
  # Number of training images, chosen at random from `train` by `seed`; 0 takes
  # all.
  first: int = option(0, _EXAMPLES)
  # Split on which the best step is chosen; "" exports the last step.
  validation: str = option("train[98%:]", _SPLIT_OR_NONE)
  # Split on which the result is reported; "" reports none.
  test: str = option("test", _SPLIT_OR_NONE)
  # Crop for evaluation. "resize": the whole image squeezed to a square (as in
  # vit_jax). "central": the central square, after the shorter side is resized
  # to `resize` pixels. "central_rounded": "central" with timm's rounding.
  # "backbone": the crop and interpolation that the source of the backbone or of
  # the embeddings states, else "resize".
  eval_crop: str = option("backbone", _EVAL_CROP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
  """Cache of frozen outputs or images: computed once, read in every step."""

  # What is computed once and then cached. "contexts": keys and values, for
  # masked regimes. "features": backbone outputs, for `head` and `probe`.
  # "images": decoded training images for random crops, in any regime; images
  # larger than `data.resize` are resized first. "none": nothing is cached.
  # "contexts" and "features" are also cached for validation. Embeddings need
  # "features", and then the features of the test split are cached too.
  what: str = option(
    "none",
    Choice(("none", "contexts", "features", "images")),
    resume="recorded",
  )
  # Number of crops of each training image to cache. If it is above 1, the crops
  # are random, and epochs alternate between them. With 1, the image is cached
  # without randomness, which needs data.train_crop "resize" and data.flip
  # False.
  crops: int = option(
    1, Number(1, 1_000, "crops of an image"), resume="recorded"
  )
  # Data type of cached contexts or features: "float32" changes no bit of the
  # results; "bfloat16" takes half of the space, but rounds. Embeddings stored
  # as bfloat16 stay bfloat16.
  dtype: str = option(
    "float32", Choice(("float32", "bfloat16")), resume="recorded"
  )
  # Where contexts or features are cached: "device" is fastest; "host" is the
  # RAM of the machine; "disk" is reused by later runs on the same images.
  where: str = option("host", Choice(("device", "host", "disk")), resume="free")
  # Directory of the cache on "disk"; "" is rows/ in $MEMORY_VIT_CACHE, or in
  # ~/.cache/memory_vit.
  dir: str = option("", _DIRECTORY, resume="free")

  @property
  def has_rows(self) -> bool:
    """Whether the cache holds outputs of the frozen pass, not images."""
    return self.what in ("contexts", "features")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
  """The task to train."""

  # Name of the task; "" takes the name of the data set.
  name: str = option(
    "",
    Text(
      "a name of a-z, 0-9, '_' and '-' such as pets-2, or \"\"",
      r"([a-z0-9][a-z0-9_-]*)?",
      64,
    ),
  )
  # What the task predicts. "classes": one class (softmax, cross-entropy).
  # "labels": any number of labels (sigmoid, binary cross-entropy). "values":
  # one or several numbers (regression on standardized values).
  kind: str = option("classes", Choice(KINDS))
  # Units of "values" in results, such as ("mm", "degrees"); () for no units.
  units: tuple[str, ...] = option(
    (), Items(Text("a unit such as mm", ".+", 40), 1_000), resume="free"
  )
  # Loss of "values": "squared", or, for values with outliers, "huber" (linear
  # beyond one standard deviation).
  loss: str = option("squared", Choice(("squared", "huber")), sweep=True)
  # Memory cells per layer, in regimes with memory.
  cells: int = option(5, _CELLS, sweep=True)
  # Width of adapters, and rank of the value projections of `probe`.
  bottleneck: int = option(
    5, Number(1, 1_280, "no wider than the tokens of a ViT-H")
  )
  # Width of the side stream, in regimes with a side stream.
  side_width: int = option(
    16, Number(1, 1_280, "no wider than the tokens of a ViT-H"), sweep=True
  )
  # How neighboring patches are mixed in the side stream: "conv" or "none".
  side_mixing: str = option("conv", Choice(SIDE_MIXING), sweep=True)
  # Directories of earlier tasks that the new task attends to (model extension),
  # or hf://OWNER/NAME/TASK. The earlier tasks stay unchanged.
  attends_to: tuple[str, ...] = option((), _TASKS, resume="free")
  # Directories of tasks that the tasks in `attends_to` attend to. A task need
  # not be given if it lies in the same folder as the task that attends to it.
  indirect: tuple[str, ...] = option((), _TASKS, resume="free")
  # Directory of a task, or hf://OWNER/NAME/TASK: training starts from the head
  # of that task. That task must have the regime `head`, like the tasks from
  # --config=closed, and the same classes as the new task. With "", the head
  # starts at zero.
  init: str = option("", _DIRECTORY, resume="free")
  # Apply the block's first LayerNorm to memory, as in the paper (Figure 2).
  memory_norm: bool = option(True, Switch(), sweep=True)
  # Standard deviation of randomly initialized memory; the paper's is 0.02. With
  # memory_norm the scale of memory does not change the outputs, but a larger
  # scale slows learning: the gradient is proportional to 1 / memory_std.
  memory_std: float = option(
    0.02, Number(0, 1e6, "a standard deviation", positive=True), sweep=True
  )
  # Initial class token: "pretrained" (a copy of the backbone's class token) or
  # "normal" (N(0, 0.02^2)). The copy is our choice: the paper learns a new
  # class token, but we do not know its initial value.
  cls_init: str = option(
    "pretrained", Choice(("pretrained", "normal")), sweep=True
  )
  # Share of the validation images that a task of "classes" may wrongly answer
  # with "unknown". After training, this share determines the threshold below
  # which an answer is "unknown". 0 sets no threshold.
  unknown: float = option(
    0.0, Number(0, 1, "a share of the images", below=True), resume="free"
  )
  # Number of outputs to which the head is padded in training, so that tasks
  # with different numbers of classes share compiled programs; 0 does not pad.
  # Outputs beyond the classes get no probability and are not exported.
  padded_classes: int = option(0, Number(0, 2**20, "outputs of a head"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
  """The optimizer; each task has its own."""

  # Optimizer "sgd" (the paper's) or "adamw", or a closed-form solver of a head
  # on the features of all training images (see --config=closed): "lda" (linear
  # discriminant analysis, for "classes") or "ridge" (ridge regression).
  name: str = option("sgd", Choice(("sgd", "adamw", *CLOSED_FORMS)), sweep=True)
  # Momentum of "sgd".
  momentum: float = option(
    0.9,
    Number(0, 1, "with 1, no gradient is ever forgotten", below=True),
    resume="recorded",
    sweep=True,
  )
  # Decoupled weight decay of "adamw", only for kernels: biases, LayerNorms,
  # class tokens, memory and position embeddings do not decay.
  weight_decay: float = option(0.0, _FACTOR, resume="recorded", sweep=True)
  # Global norm to which the gradient of a task is clipped; 0 does not clip. The
  # paper clips without stating a value; 1.0 is vit_jax's.
  grad_clip: float = option(
    1.0, Number(0, 1e6, "a norm"), resume="recorded", sweep=True
  )
  # What is clipped: the gradient of a whole "task", or the gradient of each
  # "part" (head, cls, memory, ...) separately. The gradient of memory is much
  # larger than that of the head, and dominates a shared norm.
  clip_by: str = option("task", Choice(("task", "part")), sweep=True)
  # Factor on the learning rate of the class token.
  cls_factor: float = option(1.0, _FACTOR, resume="recorded", sweep=True)
  # Factor on the learning rate of memory.
  memory_factor: float = option(1.0, _FACTOR, resume="recorded", sweep=True)
  # Linear warm-up as a share of all steps, rounded; unused if `warmup_steps` is
  # set. The default is vit_jax's share: 500 of 20,000 steps.
  warmup: float = option(
    0.025, Number(0, 1, "a share of the steps"), resume="recorded", sweep=True
  )
  # Linear warm-up in steps; 0 uses `warmup`. The configurations of the paper's
  # four data sets use 5 steps, like the public PyTorch reproduction. We could
  # not check the text of the paper.
  warmup_steps: int = option(0, _STEPS_OR_NONE, resume="recorded", sweep=True)
  # Learning rate after warm-up: "cosine" to zero (vit_jax's choice; unstated in
  # the paper) or "constant".
  schedule: str = option(
    "cosine", Choice(("cosine", "constant")), resume="recorded", sweep=True
  )
  # Share of the probability that is spread over all classes; for "labels", over
  # presence and absence of each label.
  label_smoothing: float = option(
    0.0,
    Number(0, 1, "a probability", below=True),
    resume="recorded",
    sweep=True,
  )
  # Weights in the loss: "none" (all are 1) or "balanced", so that rare classes
  # count as much as frequent classes. With n training examples, a class has the
  # weight n / (classes * examples of the class). If task.kind is "labels", an
  # example that has a label counts in the loss of this label with the weight
  # (number of examples without the label) / (number with the label).
  class_weights: str = option("none", Choice(("none", "balanced")), sweep=True)
  # Mixup: images are mixed in pairs, with shares drawn from Beta(mixup, mixup);
  # 0 is off, 0.2 is common. All trials of a sweep share the mixed images.
  mixup: float = option(
    0.0, Number(0, 1e3, "a parameter of a beta distribution"), resume="recorded"
  )
  # Number of consecutive non-finite updates after which training of the task
  # stops; until then these updates are skipped.
  max_skipped: int = option(3, _STEPS, resume="recorded")
  # Number of parts in which a batch passes through the model, to save memory.
  accumulation_steps: int = option(
    1, Number(1, 2**20, "parts of a batch"), resume="recorded"
  )

  @property
  def in_closed_form(self) -> bool:
    """Whether the head is solved in closed form, without an optimizer."""
    return self.name in CLOSED_FORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpstreamConfig:
  """Data on which the original outputs are compared before and after training.

  If this data has as many classes as the head of the backbone, accuracy is
  reported too.
  """

  # Data set on which the original outputs are compared before and after
  # training, see `data.name`. "" turns this comparison off.
  name: str = option("", _DATA_SET_OR_NONE, resume="free")
  # Directory of the data, see `data.dir`.
  dir: str = option("", _DIRECTORY, resume="free")
  # Split on which the backbone is evaluated before and after training.
  split: str = option("test", _SPLIT, resume="free")
  # Crop, see `data.eval_crop`.
  eval_crop: str = option("backbone", _EVAL_CROP, resume="free")
  # Shorter side in pixels, see `data.resize`.
  resize: int = option(0, _RESIZE, resume="free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
  """Trials of a task, trained in one pass over the same batches.

  A trial is a combination of one entry from each list that is not empty. If all
  lists are empty, there is no sweep.
  """

  # Values of `regime`. Masked regimes share passes; each regime that is not
  # masked needs separate passes. If `cache.what` is "contexts" or "features",
  # each regime caches what it can use: contexts, features or nothing. Unless
  # `export` is "all", one trial of each regime is exported: the best of all
  # trials as task.name, and the best trial of each other regime as
  # task.name-REGIME.
  regime: tuple[str, ...] = option((), Items(_REGIME, MOST_TRIALS))
  # Values of `learning_rate`.
  learning_rate: tuple[float, ...] = option((), _RATES)
  # Values of `task.cells`, in regimes with memory.
  cells: tuple[int, ...] = option((), Items(_CELLS, MOST_TRIALS))
  # Values of `seed` for initialization only: all trials get the same batches.
  seed: tuple[int, ...] = option((), _SEEDS)
  # Dictionaries of options of `task` and `optim`, such as {"optim.momentum":
  # 0.8, "task.memory_norm": False}.
  overrides: tuple[dict[str, Any], ...] = option(
    (),
    Items(Changes('a dictionary such as {"optim.momentum": 0.8}'), MOST_TRIALS),
  )
  # Which trials are exported. "best": the best on validation, as task.name.
  # "all": all trials as task.name-00, -01, ..., the best also as task.name.
  # Without validation only "all" is possible, and task.name is the first trial.
  export: str = option("best", Choice(("best", "all")), resume="free")
  # Memory (GiB) of a device for the trials of a pass; if not all trials fit,
  # they are trained in several passes. 0 takes the free memory, less a reserve.
  memory_gib: float = option(0.0, _GIB, resume="free")

  @property
  def is_on(self) -> bool:
    """Whether any option is varied."""
    return any(self._axes)

  @property
  def combinations(self) -> int:
    """The largest possible number of trials; 1 without a sweep."""
    return math.prod(max(1, len(values)) for values in self._axes)

  @property
  def _axes(self) -> tuple[tuple[Any, ...], ...]:
    return (
      self.regime, self.learning_rate, self.cells, self.seed, self.overrides,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """The mesh of devices; a batch is always split over all of them."""

  # Number of devices over which a large backbone is split; it must divide the
  # number of all devices. With 1 each device holds the whole backbone.
  fsdp: int = option(1, Number(1, 2**20, "devices"), resume="free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbConfig:
  """Weights & Biases, beside TensorBoard; needs the extra `wandb`."""

  # Project of the run; "" is off. All trials of a sweep are one run in W&B. A
  # resumed run resumes in W&B too.
  project: str = option("", _PROJECT, resume="free")
  # User or team of the project; "" is the default of the account.
  entity: str = option("", _PROJECT, resume="free")
  # Name of the run in W&B; "" for the path --workdir. In a list of runs (as in
  # `studies`), the name of each run is the path of its directory, and `name` is
  # the default of `group`.
  name: str = option("", _LABEL, resume="free")
  # Group of runs that W&B shows together.
  group: str = option("", _LABEL, resume="free")
  # "online" needs a login (`wandb login` or WANDB_API_KEY); "offline" writes to
  # WORKDIR/wandb, for `wandb sync`. "" uses WANDB_MODE, else the setting of
  # `wandb offline`, else "online".
  mode: str = option("", Choice(("", "online", "offline")), resume="free")

  def of_many(self) -> "WandbConfig":
    """Return settings for a list of runs, each a W&B run in a common group."""
    return dataclasses.replace(self, name="", group=self.group or self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run: train one task on one backbone, or a sweep of trials.

  Options that break their rules, or contradict each other, raise `ConfigError`.
  """

  # A published checkpoint by short name ("i21k-B/32"), the path or URL of an
  # .npz file, a model of transformers or timm (a directory, a .safetensors
  # file, hf://OWNER/NAME), or random weights ("random:Ti/16") to train from
  # scratch.
  backbone: str = option(
    "i21k-B/32",
    Text(
      "a short name, a file, a directory, an address or random:B/32",
      ".+",
      4_000,
    ),
    resume="free",
  )
  # GELU variant: "tanh" for vit_jax and big_vision; "exact" for weights from
  # PyTorch; "quick" for OpenAI's CLIP. "backbone" takes the variant that the
  # source of the backbone states, else "tanh", and records this variant.
  gelu: str = option("backbone", Choice(("backbone", "tanh", "exact", "quick")))
  # Side of the square input images in pixels; 0 is the backbone's own. For
  # another size the position embedding is resized. Random weights
  # ("random:...") need a size.
  image_size: int = option(0, Number(0, MAX_IMAGE_SIZE, "pixels"))
  # Compute dtype: "float32", "bfloat16", or "auto" (bfloat16 if the device
  # multiplies bfloat16 faster). Trained parameters are float32.
  dtype: str = option("float32", Choice(dtypes.CHOICES), resume="recorded")
  # Images per training step, over all devices.
  batch_size: int = option(512, _BATCH)
  # Images per evaluation batch, over all devices.
  batch_size_eval: int = option(512, _BATCH, resume="free")
  # Number of training steps, if `epochs` is 0.
  total_steps: int = option(20_000, _STEPS, resume="recorded")
  # Number of passes over the training split, such as 2.5. If it is above 0,
  # total_steps is computed from it, rounded up, and recorded. -1 is 50 passes,
  # but at least 25 steps.
  epochs: float = option(
    0.0, Number(-1, 1e6, "passes over the training split"), resume="free"
  )
  # Peak learning rate: try 0.03 to 0.3. The paper reports the accuracy of the
  # best of several learning rates, but not which rates it tried.
  learning_rate: float = option(0.1, _RATE, resume="recorded", sweep=True)
  # Random seed for initialization and data shuffling.
  seed: int = option(0, _SEED, sweep=True)
  # What is trained and how attention runs: a named regime, or the parts of a
  # masked task, such as "cls+memory+side".
  regime: str = option("memory_masked", _REGIME)
  # Steps between evaluations on data.validation. The last step is always
  # evaluated.
  eval_every: int = option(1_000, _STEPS, resume="recorded")
  # Training stops after this number of consecutive evaluations in which no
  # trial improves; 0 trains to the last step. `optim.schedule` still covers all
  # steps, so that "constant" may suit better than "cosine".
  early_stopping: int = option(
    0, Number(0, 2**31 - 1, "evaluations"), resume="recorded"
  )
  # Steps between saved states. The last step is always saved.
  checkpoint_every: int = option(1_000, _STEPS, resume="recorded")
  # Steps between progress lines.
  log_every: int = option(50, _STEPS, resume="free")
  # Number of images in attention.png, which shows the best task's attention on
  # test images (without a test split, on validation images). answers.png shows
  # predictions for three times as many test images. 0 draws neither these plots
  # nor the confusion matrix. Lists of runs draw no plots.
  log_images: int = option(8, Number(0, 64, "images"), resume="free")
  # Also write trained parameters as plain orbax checkpoints,
  # WORKDIR/orbax/NAME. Lists of runs write none, and neither does the regime
  # "full", because its checkpoint would hold the whole backbone once more.
  export_orbax: bool = option(True, Switch(), resume="free")
  # Step from which 5 steps are profiled for TensorBoard; 0 is off.
  profile_at: int = option(0, _STEPS_OR_NONE, resume="free")
  # Seconds to wait for a batch of images before the run ends with status 74 and
  # a stack trace on stderr; 0 waits for ever.
  stall_timeout: float = option(
    600.0, Number(0, 2_592_000, "seconds, up to 30 days"), resume="free"
  )
  # Run code from outside of TFDS: feature classes that a data set names, and
  # the code of TFDS data sets with a namespace ("NAMESPACE:NAME"). The flag
  # --trust_data_code turns this option on.
  trust_data_code: bool = option(False, Switch(), resume="free")
  data: DataConfig = DataConfig()
  cache: CacheConfig = CacheConfig()
  task: TaskConfig = TaskConfig()
  optim: OptimConfig = OptimConfig()
  sweep: SweepConfig = SweepConfig()
  upstream: UpstreamConfig = UpstreamConfig()
  wandb: WandbConfig = WandbConfig()
  mesh: MeshConfig = MeshConfig()

  @property
  def learned(self) -> Regime:
    """The regime: what is trained, and how attention runs."""
    return get_regime(self.regime)

  def replaced(self, values: Mapping[str, Any]) -> "Config":
    """Return the configuration with other values, {"data.flip": False, ...}.

    Raises:
      ConfigError: for an unknown key, a forbidden value, or a contradiction.
    """
    changed = self
    for key, value in values.items():
      if key not in OPTIONS:
        raise ConfigError(options.unknown("config", key, OPTIONS))
      valid = options.checked(f"config.{key}", value, OPTIONS[key])
      changed = _with(changed, key.split("."), valid)
    _require_consistent(changed)
    return changed

  def __post_init__(self) -> None:
    # Check contradictions last: these checks assume that each value is valid.
    options.require(self, "config.")
    _require_consistent(self)


# All options, {key: option}; importing fails if an option has no rule.
OPTIONS = options.table(Config)


def data_seed(config: Config) -> int:
  """Return the seed for the order and crops of training images."""
  return config.seed if config.data.seed < 0 else config.data.seed


def from_dict(values: Mapping[str, Any]) -> Config:
  """Build a `Config` from a dictionary; `ConfigError` unless its keys match."""
  return schema.build(Config, values, "config", ConfigError)


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
  """Return a copy of a section with a new value of the option at `path`."""
  name, *inner = path
  if inner:
    value = _with(getattr(section, name), inner, value)
  # `dataclasses.replace` would check all options again, for up to 1,000 trials.
  changed = copy.copy(section)
  object.__setattr__(changed, name, value)
  return changed


def to_dict(config: Config) -> dict[str, Any]:
  """Return a nested dictionary of numbers, strings and tuples."""
  return dataclasses.asdict(config)


def _require_consistent(config: Config) -> None:
  for problem in (
    *_of_training(config), *_of_closed_form(config), *_of_backbone(config),
    *_of_embeddings(config), *_of_cache(config),
  ):  # fmt: skip
    raise ConfigError(problem)


# Options that only some kinds use: {key: value required for all other kinds}.
_OF_KINDS: Mapping[str, Any] = {
  "data.per_class": 0,
  "optim.class_weights": "none",
  "optim.label_smoothing": 0.0,
  "task.units": (),
  "task.unknown": 0.0,
  "task.loss": "squared",
}


# Options outside `OptimConfig` that heads in closed form do not use.
_OF_OPTIMIZERS = (
  "learning_rate",
  "sweep.learning_rate",
  "early_stopping",
  "profile_at",
  "task.init",
  "task.loss",
  "task.padded_classes",
)


def _of_training(config: Config) -> list[str]:
  lines = []
  has_token = config.learned.has_token
  if config.task.attends_to and not (has_token or config.sweep.regime):
    lines.append(
      f"config.task.attends_to is {brief(config.task.attends_to)}, which the "
      f"regime {config.regime!r} cannot use: expected (), or a masked regime."
    )
  if len({*config.sweep.regime}) < len(config.sweep.regime):
    lines.append(
      f"config.sweep.regime lists a regime twice: {brief(config.sweep.regime)}."
    )
  if config.batch_size % config.optim.accumulation_steps:
    lines.append(
      f"config.batch_size {config.batch_size} is not a multiple of "
      f"config.optim.accumulation_steps {config.optim.accumulation_steps}."
    )
  if config.optim.name == "sgd" and config.optim.weight_decay:
    lines.append(
      f"config.optim.weight_decay is {config.optim.weight_decay}, which 'sgd' "
      "does not use: expected 0, or config.optim.name 'adamw'."
    )
  if config.early_stopping and not config.data.validation:
    lines.append(
      f"config.early_stopping is {config.early_stopping}, but "
      "config.data.validation is empty: expected 0, or a validation split."
    )
  held_out = config.data.validation or config.optim.in_closed_form
  if config.task.unknown and not held_out:
    lines.append(
      f"config.task.unknown is {config.task.unknown}, but "
      "config.data.validation is empty: expected 0, or a validation split."
    )
  kind = config.task.kind
  for key, unused in _OF_KINDS.items():
    value = operator.attrgetter(key)(config)
    if key not in KINDS[kind].options and value != unused:
      lines.append(
        f"config.{key} is {brief(value)}, which a task of {kind} "
        f"(config.task.kind) does not use: expected {unused!r}."
      )
  if config.data.per_class and config.data.first:
    lines.append(
      f"config.data.first is {config.data.first} and config.data.per_class "
      f"{config.data.per_class}: expected one of them to be 0."
    )
  if -1 < config.epochs < 0:
    lines.append(
      f"config.epochs is {config.epochs}, expected -1 or at least 0."
    )
  if not config.epochs:
    lines += beyond_the_end(config)
  if config.sweep.combinations > MOST_TRIALS:
    lines.append(
      f"config.sweep has {config.sweep.combinations} combinations, expected at "
      f"most {MOST_TRIALS}."
    )
  return lines


def _of_closed_form(config: Config) -> list[str]:
  """Return messages about options that a closed-form head does not allow."""
  name, kind = config.optim.name, config.task.kind
  if not config.optim.in_closed_form:
    return []
  if name not in KINDS[kind].closed_forms:
    methods = " or ".join(map(repr, KINDS[kind].closed_forms))
    return [
      f"config.optim.name is {name!r}, which cannot solve a task of {kind} "
      f"(config.task.kind): expected {methods}, or an optimizer."
    ]
  expected: dict[str, Any] = {} if config.sweep.regime else {"regime": "head"}
  expected |= {
    "cache.what": "features",
    "cache.crops": 1,
    "total_steps": 1,
    "epochs": 0.0,
  }
  for key, declared in OPTIONS.items():
    if key.startswith("optim.") or key in _OF_OPTIMIZERS:
      expected[key] = declared.default
  expected["optim.name"] = name
  actual = {key: operator.attrgetter(key)(config) for key in expected}
  return [
    f"config.{key} is {brief(actual[key])}, which has no meaning for a head in "
    f"closed form (config.optim.name {name!r}): expected {value!r}, as in "
    "--config=closed."
    for key, value in expected.items()
    if actual[key] != value
  ]


def _of_backbone(config: Config) -> list[str]:
  """Return messages about wrong options of a randomly initialized backbone."""
  if not config.backbone.startswith(RANDOM):
    return []
  if not config.image_size:
    return [
      "config.image_size is 0, which means the image size of the backbone, but "
      f"random weights have no image size: set it for {config.backbone!r}."
    ]
  try:
    vit_config(
      config.backbone.removeprefix(RANDOM), image_size=config.image_size
    )
  except ConfigError as error:
    return [f"config: {error}"]
  return []


def _of_embeddings(config: Config) -> list[str]:
  """Return messages about options that do not work with embeddings."""
  lines = []
  if config.upstream.name == EMBEDDINGS:
    lines.append(
      f"config.upstream.name is {EMBEDDINGS!r}, which holds no images: "
      "expected a data set of images."
    )
  if config.data.name != EMBEDDINGS:
    return lines
  if not (config.learned.on_features or config.sweep.regime):
    frozen = [repr(name) for name, kind in REGIMES.items() if kind.on_features]
    lines.append(
      f"config.regime is {config.regime!r}, for which embeddings "
      f"(config.data.name) do not suffice: expected {' or '.join(frozen)}, or "
      "images."
    )
  expected: tuple[tuple[str, Any, Any], ...] = (
    ("cache.what", config.cache.what, "features"),
    ("cache.crops", config.cache.crops, 1),
    ("data.train_crop", config.data.train_crop, "resize"),
    ("data.flip", config.data.flip, False),
    ("optim.mixup", config.optim.mixup, 0.0),
  )
  return lines + [
    f"config.{key} is {brief(actual)}, but embeddings (config.data.name) are "
    f"fixed features: expected {value!r}, as in --config=embeddings."
    for key, actual, value in expected
    if actual != value
  ]


def cacheable_part(regime: str) -> str:
  """Return the value of `cache.what` for the frozen pass of a regime."""
  kind = get_regime(regime)
  if kind.has_token:
    return "contexts"
  return "features" if kind.on_features else "none"


def _of_cache(config: Config) -> list[str]:
  """Return messages about options that contradict the options of the cache."""
  cache, data = config.cache, config.data
  lines = []
  if cache.dir and cache.where != "disk":
    lines.append(
      f"config.cache.dir is {brief(cache.dir)}, which config.cache.where "
      f"{cache.where!r} does not use: expected '', or cache.where 'disk'."
    )
  if cache.what == "none":
    return lines
  if cache.what == "images":
    return lines + _of_decoded_images(cache, config.data)
  possible = cacheable_part(config.regime)
  if config.sweep.regime:
    # Add no message about `cache.what`: a sweep over regimes replaces this
    # option for each trial by the value that suits the trial's regime.
    possible = cache.what
  if possible == "none":
    lines.append(
      f"config.cache.what is {cache.what!r}, expected 'none': the regime "
      f"{config.regime!r} changes what the backbone computes."
    )
  elif cache.what != possible:
    lines.append(
      f"config.cache.what is {cache.what!r}, expected 'none' or {possible!r}, "
      f"which the regime {config.regime!r} uses."
    )
  if config.optim.mixup:
    lines.append(
      f"config.optim.mixup is {config.optim.mixup}, expected 0 with "
      "config.cache.what: mixed images differ in every step."
    )
  fixed = data.train_crop == "resize" and not data.flip
  if cache.crops == 1 and not fixed:
    lines.append(
      "config.cache.crops is 1, which caches the image without randomness, but "
      f"config.data.train_crop is {data.train_crop!r} and config.data.flip is "
      f"{data.flip}: expected train_crop 'resize' and flip False, or more "
      "crops, such as config.cache.crops 10."
    )
  if cache.crops > 1 and fixed:
    lines.append(
      f"config.cache.crops is {cache.crops}, but config.data.train_crop "
      "'resize' without config.data.flip gives the same crop each time: "
      "expected 1."
    )
  return lines


def _of_decoded_images(cache: CacheConfig, data: DataConfig) -> list[str]:
  expected = {"crops": 1, "dtype": "float32", "where": "host"}
  lines = []
  if data.train_crop == "resize":
    lines.append(
      "config.cache.what is 'images', which is for random crops, but "
      "config.data.train_crop is 'resize', whose pixels would differ from "
      "those of evaluation: expected config.cache.what 'none', or 'contexts' "
      "or 'features' if the regime uses them."
    )
  return lines + [
    f"config.cache.{key} is {getattr(cache, key)!r}, but decoded images "
    f"(config.cache.what 'images') need {value!r}."
    for key, value in expected.items()
    if getattr(cache, key) != value
  ]


def beyond_the_end(config: Config) -> list[str]:
  """List options whose steps lie after the last step.

  With `epochs`, the last step is only known once the data is open.
  """
  late = [
    f"config.{key} is {value}, beyond config.total_steps {config.total_steps}."
    for key, value in (
      ("profile_at", config.profile_at),
      ("optim.warmup_steps", config.optim.warmup_steps),
    )
    if value > config.total_steps
  ]
  if config.early_stopping and config.eval_every >= config.total_steps:
    late.append(
      f"config.early_stopping is {config.early_stopping}, but the only "
      f"evaluation is at the last step: expected a config.eval_every below "
      f"config.total_steps {config.total_steps}."
    )
  return late

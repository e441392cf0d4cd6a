"""The configuration of a run: every option, its default, and what it means.

The defaults are those of the paper where it states one; the size of images is
left to the backbone. Beside each default stand the option's rules: the values
that it may have, and where they say so that it may change when a run goes on,
or that the trials of a sweep may differ in it. `configs/base.py` turns this
tree into an `ml_collections.ConfigDict`, the only form in which it can be
changed; `from_dict` turns that back, and refuses what it does not know.
"""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from memory_vit.errors import ConfigError
from memory_vit.model.regimes import (
  MASKED_PARTS,
  REGIMES,
  SIDE_MIXING,
  Regime,
  SideKind,
  get_regime,
  is_regime,
)
from memory_vit.model.vit_config import (
  MAX_IMAGE_SIZE,
  MAX_RESIZE,
  RANDOM,
  VARIANTS,
  vit_config,
)
from memory_vit.runtime import dtypes, options, schema
from memory_vit.runtime.messages import brief
from memory_vit.runtime.options import option, section
from memory_vit.runtime.rules import (
  Changes,
  Choice,
  Items,
  Number,
  Switch,
  Text,
)

# The data set of rows that `memory-vit embed` wrote.
EMBEDDINGS = "embeddings"
# All combinations of a sweep are compared with each other.
MOST_TRIALS = 1_000
# What is tried where nothing is known of a task. The paper names no learning
# rate; these reach as far as full fine-tuning is said to break down.
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclasses.dataclass(frozen=True)
class _RegimeName(Choice):
  """A preset, or a list of parts."""

  names: tuple[str, ...] = tuple(REGIMES)

  @property
  def expected(self) -> str:
    return (
      f"{super().expected}, or cls and some of {', '.join(MASKED_PARTS[1:])} "
      "in this order, such as 'cls+memory+side', which has no such name"
    )

  def accepts(self, value: Any) -> bool:
    return is_regime(value)


# Rules that several options share.
# Steps, and what is counted in them, are int32 in a training state.
_STEPS = Number(1, 2**31 - 1, "steps are counted in 32 bits")
_STEPS_OR_NONE = dataclasses.replace(_STEPS, least=0)
# Beyond, every update of float32 values overflows.
_RATE = Number(0, 1e6, "a learning rate", positive=True)
_RATES = Items(_RATE, MOST_TRIALS)
_FACTOR = Number(0, 1e6, "a factor")
_BATCH = Number(1, 2**20, "images of a batch")
_SEED = Number(0, 2**32 - 1, "jax uses 32 bits of a seed")
_SEEDS = Items(_SEED, MOST_TRIALS)
_CELLS = Number(
  0, 4_096, "with more, a task of a ViT-H is beyond the 1 GiB of a saved task"
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
class TrainDataConfig:
  """A data set to train on, and how its images are prepared."""

  # A TFDS name ("cifar100", "sun397/tfds"), "folder", "list", "embeddings", or
  # what comes with a package: "digits:0-4", "glyphs:inverted".
  name: str = option("", _DATA_SET_OR_NONE)
  # TFDS data directory; of "folder" what holds train/ and test/, of "list" what
  # holds train.txt and test.txt, of "embeddings" what holds train/, or
  # the output of `memory-vit embed` itself, which is "train"; "" is TFDS's own
  # default directory.
  dir: str = option("", _DIRECTORY, resume="free")
  # Splits, in the notation of TFDS: "train[:98%]".
  train: str = option("train[:98%]", _SPLIT)
  # "inception": a random part of the image (area 5-100 %, aspect 3/4-4/3);
  # "small": the shorter side to `resize` pixels, then a random square;
  # "resize": the whole image squeezed into the square, as evaluation does it.
  train_crop: str = option(
    "inception", Choice(("inception", "small", "resize")), resume="on_request"
  )
  # Mirror half of the training images; wrong for digits and letters.
  flip: bool = option(True, Switch(), resume="on_request")
  # The shorter side before a crop that is not "resize", in pixels; 0 is 8/7 of
  # image_size (256 for 224).
  resize: int = option(0, _RESIZE, resume="on_request")
  # Of the order of the training images, and of their crops; -1 is that of the
  # run. The trials of a sweep share their batches, whatever their seeds.
  seed: int = option(-1, dataclasses.replace(_SEED, least=-1))
  # Data sets without random access are read into memory, as encoded images;
  # larger ones (GiB) are refused with a word on how to convert them.
  cache_gib: float = option(16.0, _GIB, resume="free")
  # Maximum number of unreadable examples to skip per split before the run
  # fails. In training the next readable one takes their place; they do not
  # count in evaluation, and the result says how many they were. Those of all
  # processes count together whenever a state is saved.
  max_bad: int = option(0, _EXAMPLES, resume="free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(TrainDataConfig):
  """The data set of a task: what it is trained on, and evaluated."""

  # How a resumed run verifies that its data is unchanged: "files" (names, sizes
  # and times of the last change) or "contents" (SHA-256 of all bytes, read at
  # every start). Of TFDS sets what TFDS recorded counts as well. May
  # change when a run goes on: it is compared as its state was saved.
  digest: str = option("files", Choice(("files", "contents")), resume="free")
  # Of a TFDS data set with several labels: the name of a feature, or a label of
  # VTAB: "clevr_count", "clevr_distance", "kitti_distance", "dsprites_x",
  # "dsprites_orientation", "smallnorb_azimuth" or "smallnorb_elevation".
  label: str = option("", Text('a feature of the data set, or ""', ".*", 200))
  # Train on so many images of each class, chosen by `seed` from `train`; 0
  # takes all. It is an error where a class has fewer.
  per_class: int = option(0, _EXAMPLES)
  # Train on so many images of `train`, of whatever class, chosen by `seed`; 0
  # takes all.
  first: int = option(0, _EXAMPLES)
  # On which the best step is chosen; "" keeps the last step instead.
  validation: str = option("train[98%:]", _SPLIT_OR_NONE)
  # On which the result is reported; "" reports none.
  test: str = option("test", _SPLIT_OR_NONE)
  # "resize": the whole image squeezed into the square, as vit_jax evaluates;
  # "central": the shorter side to `resize` pixels, then the middle;
  # "central_rounded": the same with the middle of timm, which may begin a pixel
  # later. "backbone" is what the source of the backbone states, its
  # interpolation too, and "resize" where it states nothing; that is recorded as
  # "resize". Embeddings state how their images were prepared: that is recorded.
  eval_crop: str = option("backbone", _EVAL_CROP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepConfig:
  """What of a frozen pass is computed once, and read in every step."""

  # "contexts": what masked tasks read of the backbone; "features": what a head
  # reads of it; "none" computes it in every step. Validation keeps the same.
  # "images", in any regime: the decoded images of training, no larger than with
  # a shorter side of `data.resize`, so that random crops need no decoding.
  # Embeddings are "features" that are read and not computed; of the test split
  # as well.
  what: str = option(
    "none",
    Choice(("none", "contexts", "features", "images")),
    resume="on_request",
  )
  # How many fixed random crops of every training image are kept, and taken in
  # turn by epoch. 1 is the image without randomness: data.train_crop "resize",
  # and no data.flip.
  views: int = option(
    1, Number(1, 1_000, "crops of an image"), resume="on_request"
  )
  # "float32" keeps what was computed, to the bit (of a backbone in bfloat16,
  # its 16 bits); "bfloat16" takes half of the room, and is rounded. Embeddings
  # that are stored as bfloat16 are kept as that.
  dtype: str = option(
    "float32", Choice(("float32", "bfloat16")), resume="on_request"
  )
  # "device" is fastest; "host" is the memory of the machine; "disk" is found
  # again by later runs on the same images.
  where: str = option("host", Choice(("device", "host", "disk")), resume="free")
  # For "disk"; "" is kept/ in $MEMORY_VIT_CACHE, or in ~/.cache/memory_vit.
  dir: str = option("", _DIRECTORY, resume="free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
  """The task that is learned."""

  # "" takes the name of the data set.
  name: str = option(
    "", Text('a name such as pets-2, or ""', r"([a-z0-9][a-z0-9_-]*)?", 64)
  )
  # Memory cells per layer, in the regimes that have memory.
  cells: int = option(5, _CELLS, sweep=True)
  # Width of adapters, in the regimes that have some (the paper's), and of the
  # values of `probe`.
  bottleneck: int = option(
    5, Number(1, 1_280, "no wider than the tokens of a ViT-H")
  )
  # Width of the side stream, in the regimes that have one.
  side_width: int = option(
    16, Number(1, 1_280, "no wider than the tokens of a ViT-H"), sweep=True
  )
  # How a side stream mixes the patches: "conv" with their neighbours; "none"
  # reads each for itself.
  side_mixing: str = option("conv", Choice(SIDE_MIXING), sweep=True)
  # Directories of earlier tasks that this one reads (model extension). They
  # stay as they are.
  attends_to: tuple[str, ...] = option((), _TASKS, resume="free")
  # Tasks that those of `attends_to` read, and this one does not, are found by
  # their names beside the one that reads them. Directories of those that lie
  # elsewhere.
  indirect: tuple[str, ...] = option((), _TASKS, resume="free")
  # The paper: memory passes the block's first LayerNorm (Figure 2).
  memory_norm: bool = option(True, Switch(), sweep=True)
  # Memory is drawn from N(0, memory_std^2); 0.02 is the paper's. With
  # memory_norm its scale does not matter for what the model computes, but a
  # larger one makes it learn more slowly and evenly: the gradient is
  # proportional to 1 / memory_std.
  memory_std: float = option(
    0.02, Number(0, 1e6, "a standard deviation", positive=True), sweep=True
  )
  # "pretrained" starts the class token as a copy of the original one, "normal"
  # at N(0, 0.02^2), as memory starts. The copy is our choice: of the paper we
  # know that it learns a new class token, not where that starts.
  cls_init: str = option(
    "pretrained", Choice(("pretrained", "normal")), sweep=True
  )
  # Above 0, the head is trained with so many outputs, of which those beyond the
  # classes of the data set get no probability and are not exported: tasks with
  # different numbers of classes then run the same compiled programs.
  padded_classes: int = option(0, Number(0, 2**20, "outputs of a head"))

  @property
  def side(self) -> SideKind:
    """Width and mixing of the side stream."""
    return SideKind(self.side_width, self.side_mixing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
  """The optimiser; each task has its own."""

  # "sgd" (the paper's) or "adamw".
  name: str = option("sgd", Choice(("sgd", "adamw")), sweep=True)
  # Of "sgd".
  momentum: float = option(
    0.9,
    Number(0, 1, "with 1, no gradient is ever forgotten", below=True),
    resume="on_request",
    sweep=True,
  )
  # Decoupled, for "adamw" alone.
  weight_decay: float = option(0.0, _FACTOR, resume="on_request", sweep=True)
  # Global norm to which the gradient of a task is clipped; 0 does not clip. The
  # paper clips and states no value; 1.0 is vit_jax's.
  grad_clip: float = option(
    1.0, Number(0, 1e6, "a norm"), resume="on_request", sweep=True
  )
  # The norm of what is clipped: of a whole "task", or of each "part" of it
  # (head, cls, memory, ...) alone. The gradient of memory is much larger than
  # that of the head, and uses up a clip that they share.
  clip_by: str = option("task", Choice(("task", "part")), sweep=True)
  # Factor on the learning rate of the class token.
  cls_factor: float = option(1.0, _FACTOR, resume="on_request", sweep=True)
  # Factor on the learning rate of memory.
  memory_factor: float = option(1.0, _FACTOR, resume="on_request", sweep=True)
  # Linear warm-up, as a share of the steps, to the nearest whole number. It is
  # vit_jax's 500 of 20,000, and does not count where `warmup_steps` is given.
  warmup: float = option(
    0.025, Number(0, 1, "a share of the steps"), resume="on_request", sweep=True
  )
  # Linear warm-up in steps; 0 leaves its length to `warmup`. The configurations
  # of the paper's four data sets say 5, as its public PyTorch reproduction
  # reports of the paper, whose own text we could not check.
  warmup_steps: int = option(0, _STEPS_OR_NONE, resume="on_request", sweep=True)
  # After warm-up: "cosine" to zero (vit_jax's choice; unstated in the paper) or
  # "constant".
  schedule: str = option(
    "cosine", Choice(("cosine", "constant")), resume="on_request", sweep=True
  )
  # So much of the probability is spread over all classes.
  label_smoothing: float = option(
    0.0,
    Number(0, 1, "a probability", below=True),
    resume="on_request",
    sweep=True,
  )
  # "balanced" weighs the loss of an example by n / (classes * count), with the
  # count of its class in the training split: rare classes count as much as
  # frequent ones. "none" weighs all examples alike.
  class_weights: str = option("none", Choice(("none", "balanced")), sweep=True)
  # Above 0, mixup: images are mixed in pairs, with shares drawn from
  # Beta(mixup, mixup). 0.2 is common; the trials of a sweep share their images.
  mixup: float = option(
    0.0, Number(0, 1e3, "of a beta distribution"), resume="on_request"
  )
  # An update that is not finite is skipped; after so many in a row, training of
  # that task stops.
  max_skipped: int = option(3, _STEPS, resume="on_request")
  # A batch goes through the model in so many parts, to save memory.
  accumulation_steps: int = option(
    1, Number(1, 2**20, "parts of a batch"), resume="on_request"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpstreamConfig:
  """Data on which the original outputs are compared, before and after.

  If they have as many classes as the head of the backbone, its accuracy on them
  is reported, too.
  """

  # As `data.name`; "" compares nothing.
  name: str = option("", _DATA_SET_OR_NONE, resume="free")
  # As `data.dir`.
  dir: str = option("", _DIRECTORY, resume="free")
  # On which the backbone is evaluated, before training and after it.
  split: str = option("test", _SPLIT, resume="free")
  # As `data.eval_crop`.
  eval_crop: str = option("backbone", _EVAL_CROP, resume="free")
  # As `data.resize`.
  resize: int = option(0, _RESIZE, resume="free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
  """Makes a backbone first, from random weights; for demonstrations."""

  # For example "Micro/2"; "" loads `backbone` instead.
  variant: str = option(
    "",
    Text(
      'a variant such as "Micro/2", or ""',
      rf"(({'|'.join(VARIANTS)})/[1-9][0-9]{{0,3}})?",
    ),
  )
  # A backbone is made once, from images that stay as they were prepared.
  data: TrainDataConfig = section(TrainDataConfig(), on_request=False)
  # Steps of this training.
  total_steps: int = option(0, _STEPS_OR_NONE)
  # Images in a step of it.
  batch_size: int = option(128, _BATCH)
  # The peak, for AdamW.
  learning_rate: float = option(1e-3, _RATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
  """Trials of the task, learned in one pass over the same batches.

  Every combination of the lists, for each of `overrides`, is a trial. All
  empty: no sweep.
  """

  # Values of `regime`. Masked ones share passes, each other one has its own;
  # each keeps of `keep` what it reads. The best trial of each is exported: the
  # best of all as task.name, the others with their regime behind that, unless
  # `export` is "all".
  regime: tuple[str, ...] = option((), Items(_REGIME, MOST_TRIALS))
  # Values of `learning_rate`.
  learning_rate: tuple[float, ...] = option((), _RATES)
  # Values of `task.cells`, in the regimes that have memory.
  cells: tuple[int, ...] = option((), Items(_CELLS, MOST_TRIALS))
  # Initialization seeds of a task; the batches are the same for all.
  seed: tuple[int, ...] = option((), _SEEDS)
  # Dictionaries such as {"optim.momentum": 0.8, "task.memory_norm": False}. Of
  # `task` and `optim` all can vary but what all trials share.
  overrides: tuple[dict[str, Any], ...] = option(
    (),
    Items(Changes('a dictionary such as {"optim.momentum": 0.8}'), MOST_TRIALS),
  )
  # "best" exports the trial that is best on validation, as task.name; "all"
  # the others too, as task.name-00, -01, ... Without a validation split there
  # is no best one: only "all" is possible then, and task.name is the first.
  export: str = option("best", Choice(("best", "all")), resume="free")
  # Where not all trials fit into so much memory (GiB), they are trained in
  # several passes; 0 is what is free.
  memory_gib: float = option(0.0, _GIB, resume="free")

  @property
  def is_on(self) -> bool:
    """Whether there is anything to vary."""
    return any(self._axes)

  @property
  def combinations(self) -> int:
    """Number of trials, at most; 1 where nothing is varied."""
    return math.prod(max(1, len(values)) for values in self._axes)

  @property
  def _axes(self) -> tuple[tuple[Any, ...], ...]:
    return (
      self.regime, self.learning_rate, self.cells, self.seed, self.overrides,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Devices that share the work; a batch is always split over all."""

  # Over how many devices the backbone is split, for one that is too large for
  # a device; it divides their number. With 1 each device has all of it.
  fsdp: int = option(1, Number(1, 2**20, "devices"), resume="free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbConfig:
  """Weights & Biases, beside TensorBoard; needs the extra `wandb`."""

  # Where the run goes, once for all trials of a sweep; "" logs nothing there. A
  # run that goes on in the same --workdir goes on in W&B as well. That of
  # `pretrain` is not logged; those of a list are, each for itself.
  project: str = option("", _PROJECT, resume="free")
  # Of the project: a user or a team; "" is the default one of who is logged in.
  entity: str = option("", _PROJECT, resume="free")
  # Of the run; "" is --workdir. The runs of a list are named by their
  # directories, and this is their group where `group` is "".
  name: str = option("", _LABEL, resume="free")
  # Runs of one group are shown together.
  group: str = option("", _LABEL, resume="free")
  # "online" needs a login (`wandb login`, or WANDB_API_KEY); "offline" writes
  # to WORKDIR/wandb, for `wandb sync`. "" is as WANDB_MODE says, else as
  # `wandb offline` has set it, else "online".
  mode: str = option("", Choice(("", "online", "offline")), resume="free")

  def of_many(self) -> "WandbConfig":
    """For a list of runs: each its own run of W&B, in one group."""
    return dataclasses.replace(self, name="", group=self.group or self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run: learn one task on one backbone, or a sweep of trials."""

  # A published checkpoint by short name ("i21k-B/32"), the path or address of
  # an .npz file, a model of transformers or timm (a directory, a .safetensors
  # file, hf://OWNER/NAME), or random weights ("random:Ti/16"), to train from
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
  # "tanh" as vit_jax and big_vision train; "exact" for weights from PyTorch;
  # "quick" for CLIP of OpenAI. "backbone" is what the source of the backbone
  # states, and "tanh" where it states nothing; it is recorded as that.
  gelu: str = option("backbone", Choice(("backbone", "tanh", "exact", "quick")))
  # Side of the square images that the model gets, in pixels; 0 is the
  # backbone's own. For another one the position embedding is resized. Random
  # weights ("random:...", `pretrain`) have no size of their own: they need one.
  image_size: int = option(0, Number(0, MAX_IMAGE_SIZE, "pixels"))
  # Compute dtype: "float32", "bfloat16", or "auto", which is bfloat16 if the
  # device multiplies it faster. What is trained is float32.
  dtype: str = option("float32", Choice(dtypes.CHOICES), resume="on_request")
  # Images in a step, over all devices.
  batch_size: int = option(512, _BATCH)
  # Images in a batch of an evaluation.
  batch_size_eval: int = option(512, _BATCH, resume="free")
  # Steps of training, where `epochs` is 0.
  total_steps: int = option(20_000, _STEPS, resume="on_request")
  # How often each example of `data.train` is seen, 2.5 for instance. Above 0,
  # total_steps is what that takes, rounded up, and is recorded as that number.
  epochs: float = option(
    0.0, Number(0, 1e6, "passes over the training split"), resume="free"
  )
  # The peak. The paper reports the best of several for each data set, and names
  # none: try 0.03 to 0.3.
  learning_rate: float = option(0.1, _RATE, resume="on_request", sweep=True)
  # Random seed for initialization and data shuffling.
  seed: int = option(0, _SEED, sweep=True)
  # What is trained, and how attention runs: see `regimes`. Parts of a masked
  # task may be listed instead, "cls+memory+side".
  regime: str = option("memory_masked", _REGIME)
  # Steps between evaluations on data.validation. The last step is evaluated
  # whatever is said here: a shorter run, also of few `epochs`, at that alone.
  eval_every: int = option(1_000, _STEPS, resume="on_request")
  # Training stops after so many evaluations in a row by which no trial became
  # better on validation; 0 goes on to the last step. The learning rate still
  # falls as if no run stopped early: "constant" may suit this better.
  early_stopping: int = option(
    0, Number(0, 2**31 - 1, "evaluations"), resume="on_request"
  )
  # Steps between saved states. The last step is saved whatever is said here.
  checkpoint_every: int = option(1_000, _STEPS, resume="on_request")
  # Steps between progress lines.
  log_every: int = option(50, _STEPS, resume="free")
  # Images of the test split (else of validation) on which the best task's
  # attention is drawn at the end, as attention.png and for TensorBoard; three
  # times as many of the test split with its answers, as answers.png, and its
  # confusions there. 0 draws nothing. Lists of runs draw nothing.
  log_images: int = option(8, Number(0, 64, "images"), resume="free")
  # Whether trained parameters are also written as plain orbax checkpoints,
  # WORKDIR/orbax/NAME, beside each new task in WORKDIR/tasks. Never for "full",
  # where they would double gigabytes. Lists of runs write none.
  export_orbax: bool = option(True, Switch(), resume="free")
  # Step at which a profile of 5 steps is taken, for TensorBoard; 0 takes none.
  profile_at: int = option(0, _STEPS_OR_NONE, resume="free")
  # Seconds to wait for a batch of images. Then what the process was doing is
  # written to stderr and it ends, with status 74; 0 waits for ever.
  stall_timeout: float = option(
    600.0, Number(0, 2_592_000, "seconds, up to 30 days"), resume="free"
  )
  # Whether data sets may name code of their own, which is then run: classes of
  # features outside of TFDS, and TFDS names with a namespace. Also
  # --trust_data_code.
  trust_data_code: bool = option(False, Switch(), resume="free")
  data: DataConfig = DataConfig()
  keep: KeepConfig = KeepConfig()
  task: TaskConfig = TaskConfig()
  optim: OptimConfig = OptimConfig()
  sweep: SweepConfig = SweepConfig()
  upstream: UpstreamConfig = UpstreamConfig()
  pretrain: PretrainConfig = PretrainConfig()
  wandb: WandbConfig = WandbConfig()
  mesh: MeshConfig = MeshConfig()

  @property
  def learned(self) -> Regime:
    """What `regime` says: what is trained, and how attention runs."""
    return get_regime(self.regime)

  def replaced(self, values: Mapping[str, Any]) -> "Config":
    """The configuration with other values, {"data.flip": False, ...}.

    Only these are checked by their rules, and whether they contradict others.

    Raises:
      ConfigError: for a key that does not exist, or a value that cannot be.
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
    # Contradictions are looked for among values that are possible alone.
    options.require(self, "config.")
    _require_consistent(self)


# {key: option}: raises at import where an option has no rules.
OPTIONS = options.table(Config)


def data_seed(config: Config) -> int:
  """The seed of the training images' order and crops."""
  return config.seed if config.data.seed < 0 else config.data.seed


def from_dict(values: Mapping[str, Any]) -> Config:
  """A nested dictionary -> `Config`.

  Raises:
    ConfigError: for a missing or an unknown key, or a value of another type.
  """
  return schema.build(Config, values, "config", ConfigError)


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
  """A copy of a section with another value of the option at a path."""
  name, *inner = path
  if inner:
    value = _with(getattr(section, name), inner, value)
  # Not by `dataclasses.replace`, which would check all options anew: a sweep
  # has up to 1,000 trials.
  changed = copy.copy(section)
  object.__setattr__(changed, name, value)
  return changed


def to_dict(config: Config) -> dict[str, Any]:
  """`Config` -> nested dictionary of numbers, strings and tuples."""
  return dataclasses.asdict(config)


def _require_consistent(config: Config) -> None:
  """Raise `ConfigError` for the first contradiction between options."""
  for problem in (
    *_of_training(config), *_of_backbone(config), *_of_embeddings(config),
    *_of_cache(config),
  ):  # fmt: skip
    raise ConfigError(problem)


def _of_training(config: Config) -> list[str]:
  """List contradictions in how a task is trained."""
  lines = []
  kind = config.learned
  if config.task.attends_to and not (kind.composes or config.sweep.regime):
    lines.append(
      f"config.task.attends_to is {brief(config.task.attends_to)}, which the "
      f"regime {config.regime!r} cannot read: expected (), or a masked regime."
    )
  if len({*config.sweep.regime}) < len(config.sweep.regime):
    lines.append(
      f"config.sweep.regime names one twice: {brief(config.sweep.regime)}."
    )
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
  if config.early_stopping and not config.data.validation:
    lines.append(
      f"config.early_stopping is {config.early_stopping}, and there is no "
      "config.data.validation to look at: expected 0, or a split."
    )
  if config.data.per_class and config.data.first:
    lines.append(
      f"config.data.first is {config.data.first} and config.data.per_class "
      f"{config.data.per_class}: expected one of them to be 0."
    )
  if not config.epochs:
    lines += beyond_the_end(config)
  if config.sweep.combinations > MOST_TRIALS:
    lines.append(
      f"config.sweep has {config.sweep.combinations} combinations, expected at "
      f"most {MOST_TRIALS}."
    )
  return lines


def _of_backbone(config: Config) -> list[str]:
  """List contradictions in a backbone that the run makes itself."""
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


def _of_embeddings(config: Config) -> list[str]:
  """List options that do not go with embeddings, or take them for images."""
  lines = [
    f"config.{key}.name is {EMBEDDINGS!r}, which holds no images: expected a "
    "data set of images."
    for key, data in (
      ("upstream", config.upstream), ("pretrain.data", config.pretrain.data)
    )
    if data.name == EMBEDDINGS
  ]  # fmt: skip
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
    ("keep.what", config.keep.what, "features"),
    ("keep.views", config.keep.views, 1),
    ("data.train_crop", config.data.train_crop, "resize"),
    ("data.flip", config.data.flip, False),
    ("optim.mixup", config.optim.mixup, 0.0),
    ("pretrain.variant", config.pretrain.variant, ""),
  )
  return lines + [
    f"config.{key} is {brief(found)}, but embeddings (config.data.name) were "
    f"made before, of images as they are: expected {value!r}, as "
    "--config=embeddings has it."
    for key, found, value in expected
    if found != value
  ]


def cacheable_part(regime: str) -> str:
  """What of a pass of this regime is frozen: a value of `keep.what`."""
  kind = get_regime(regime)
  if kind.composes:
    return "contexts"
  return "features" if kind.on_features else "none"


def _of_cache(config: Config) -> list[str]:
  """List contradictions between what is kept, and what a step computes."""
  keep, data = config.keep, config.data
  lines = []
  if keep.dir and keep.where != "disk":
    lines.append(
      f"config.keep.dir is {brief(keep.dir)}, which config.keep.where "
      f"{keep.where!r} does not use: expected '', or where 'disk'."
    )
  if keep.what == "none":
    return lines
  if keep.what == "images":
    return lines + _of_decoded_images(keep, config.data)
  possible = cacheable_part(config.regime)
  if config.sweep.regime:
    possible = keep.what  # each trial is looked at for itself
  if possible == "none":
    lines.append(
      f"config.keep.what is {keep.what!r}, expected 'none': the regime "
      f"{config.regime!r} changes what the backbone computes."
    )
  elif keep.what != possible:
    lines.append(
      f"config.keep.what is {keep.what!r}, expected 'none' or {possible!r}, "
      f"which the regime {config.regime!r} reads."
    )
  if config.optim.mixup:
    lines.append(
      f"config.optim.mixup is {config.optim.mixup}, expected 0 with "
      "config.keep.what: mixed images are new in every step."
    )
  fixed = data.train_crop == "resize" and not data.flip
  if keep.views == 1 and not fixed:
    lines.append(
      "config.keep.views is 1, the image without randomness, but "
      f"config.data.train_crop is {data.train_crop!r} and config.data.flip is "
      f"{data.flip}: expected train_crop 'resize' and flip False, or more "
      "views, such as config.keep.views 10."
    )
  if keep.views > 1 and fixed:
    lines.append(
      f"config.keep.views is {keep.views}, but config.data.train_crop 'resize' "
      "without config.data.flip gives the same view each time: expected 1."
    )
  return lines


def _of_decoded_images(keep: KeepConfig, data: DataConfig) -> list[str]:
  """List options that do not go with decoded images."""
  expected = {"views": 1, "dtype": "float32", "where": "host"}
  lines = []
  if data.train_crop == "resize":
    lines.append(
      "config.keep.what is 'images', which is for random crops, but "
      "config.data.train_crop is 'resize', whose pixels would not be those of "
      "evaluation any more: expected config.keep.what 'none', or 'contexts' or "
      "'features' where the regime has some."
    )
  return lines + [
    f"config.keep.{key} is {getattr(keep, key)!r}, but decoded images "
    f"(config.keep.what 'images') have {value!r}: expected that."
    for key, value in expected.items()
    if getattr(keep, key) != value
  ]


def beyond_the_end(config: Config) -> list[str]:
  """List options that lie after the last step, one line each.

  Of a run in epochs the last step is known once its data is.
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

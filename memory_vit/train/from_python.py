"""Train and evaluate tasks by one call each, on data in Python.

The functions build a configuration, open the data, and run the same code as the
commands `train` and `evaluate`.
"""

# Keep annotations unevaluated, since the extra `train` may not be installed.
from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epy

from memory_vit.config import FEW_LEARNING_RATES, Config
from memory_vit.errors import (
  BackboneError,
  ConfigError,
  TaskError,
  TrainingError,
)
from memory_vit.kinds import KINDS, TaskKind
from memory_vit.kinds.scores import Evaluation, Scores
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import NAME_RULE, Task, is_name, require_backbone
from memory_vit.run_result import RunResult, TrialResult
from memory_vit.runtime import messages, paths, progress_bar, schema, sharding
from memory_vit.tasks import store
from memory_vit.tasks.compose import TasksLike, require_one_pass, task_tuple

with epy.lazy_imports(
  error_callback=f"Training and evaluation: {messages.installation('train')}"
):
  from memory_vit.data import in_memory
  from memory_vit.evaluation import evaluate, task_data
  from memory_vit.plots import runs
  from memory_vit.train import metric_writers, run, settle, sweep

if TYPE_CHECKING:
  from pathlib import Path

  from memory_vit.data.split import Split
  from memory_vit.runtime.preemption import StopSignal

logger = logging.getLogger(__name__)

# Number of evaluations, and number of logged training losses, in a run.
_VALIDATIONS, _POINTS = 5, 20
# Maximum number of steps that a resumed run has to repeat.
_MOST_REPEATED = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """A trained task with its scores and history.

  Attributes:
    task: task of the best trial on the validation split.
    scores: scores of this task on the test split. Without a test split, on the
      validation split, which chose the task, so scores are optimistic. Without
      both, `fit_head` uses cross-validation; scores are empty if a class has a
      single image. On the test split, loss and calibration error are at the
      temperature of the task, otherwise at temperature 1.
    history: curves of this trial, {"train/loss": (steps, values),
      "validation/top1": ...}, with the names that TensorBoard shows.
    trials: results of all trials, the best on validation first.
  """

  task: Task
  scores: Scores
  history: Mapping[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
    repr=False
  )
  trials: tuple[TrialResult, ...] = dataclasses.field(repr=False)

  @property
  def score(self) -> float | None:
    """Accuracy (classes), mean average precision (labels) or R2 (values).

    None if no output was finite.
    """
    return self.scores.score

  @property
  def accuracy(self) -> float | None:
    """`scores.accuracy`, for the kind "classes" only."""
    return self.scores.accuracy


def train_and_evaluate(
  config: Config,
  workdir: str | os.PathLike[str],
  stop: StopSignal | None = None,
) -> RunResult:
  """Train a task or a sweep, or resume a run, as `memory-vit train` does.

  Args:
    config: configuration of the run, from `read_config`.
    workdir: directory for the result, tasks, saved states and logs, local or in
      a bucket (gs://BUCKET/DIRECTORY); created if it does not exist.
    stop: signal that makes the run save its state and stop training.

  Returns:
    The content of `result.json`.

  Raises:
    MemoryVitError: for unusable input, and if another run is using `workdir`.
    Interrupted: if `stop` stopped the run.
  """
  directory = paths.place(workdir, "workdir")
  return run.train_and_evaluate(config, directory, stop)


def train_task(
  backbone: Backbone,
  train: Any,
  *,
  name: str,
  kind: str = "classes",
  validation: Any = None,
  test: Any = None,
  class_names: Sequence[str] = (),
  keys: tuple[str, str] = ("image", "label"),
  regime: str = "memory_masked",
  cells: int = 5,
  epochs: float | None = None,
  learning_rate: float | Sequence[float] | np.ndarray | None = None,
  batch_size: int = 128,
  seed: int = 0,
  init: Task | str | os.PathLike[str] | None = None,
  options: Mapping[str, Any] | None = None,
  workdir: str | os.PathLike[str] | None = None,
  progress: bool = True,
) -> TrainResult:
  """Train a task as the command `memory-vit train` does.

  A split is (images, labels); a pandas, Polars or Arrow table with columns
  `keys`; an iterable, such as an unbatched tf.data, torch or Hugging Face data
  set, of pairs (image, label) or of dictionaries with `keys`; or the folder
  DATA/train or DATA/test with a folder of images for each class. All forms
  except folders are read into memory, once.

  An image is the path or the bytes of an image file, a Pillow image, or an
  array (h, w), (h, w, 3), (3, h, w), or (h, w, 4), whose alpha is dropped.
  Arrays hold integers from 0 to 255, or floats from 0 to 1. Sizes may differ:
  training uses random crops and mirroring (see `options`), and evaluation uses
  `task.spec.preprocessing`. A label is an integer from 0, or the name of a
  class; for the kind "labels", a list of these, or an array with a 0 or 1 for
  each label; for the kind "values", a number or a vector of numbers.

  Args:
    backbone: backbone from `load_backbone`; it stays unchanged.
    train: training split.
    name: name of the task, of a-z, 0-9, "-" and "_".
    kind: what the task predicts: "classes", one of several; "labels", any
      number of several; "values", numbers (regression).
    validation: split on which the best step and trial are chosen; by default,
      a tenth of `train` is held out.
    test: split for the final scores.
    class_names: names of classes, labels or values; by default those of the
      data, else the sorted names among the training labels, else "0", "1", ...
    keys: keys of the image and the label in a dictionary or a table.
    regime: regime, which says what is trained, see `regimes`.
    cells: memory cells per layer, in the regimes that have memory.
    epochs: passes over the training split; by default 50, or more if 50 epochs
      are fewer than 25 steps.
    learning_rate: peak learning rate. Each of several rates is a trial; trials
      share every pass in the regimes that allow it. By default 0.03, 0.3 and 1.
    batch_size: images per step.
    seed: random seed for initialization and data shuffling.
    init: task (or its path) of the regime "head" with the same classes, such as
      from `fit_head`: training starts from its head. Pass the same `train` and
      `validation` to both calls, because a head scores too high on validation
      images that it was trained on.
    options: options of the command, such as {"data.flip": False} for
      --config.data.flip=false.
    workdir: directory for the files of the run; repeat the call to resume it.
      By default a temporary directory.
    progress: whether to show progress.

  Compiled programs are cached on disk, in ~/.cache/memory_vit/xla unless JAX
  has another cache, so that later processes with the same shapes start sooner.

  Raises:
    MemoryVitError: for unusable input.
  """
  options = options or {}
  arguments = _arguments(backbone, name, kind, regime, batch_size, seed)
  arguments["task.cells"] = cells
  if epochs is not None:
    arguments |= {"epochs": epochs, "total_steps": Config.total_steps}
  elif "total_steps" not in options:
    arguments["epochs"] = -1.0
  rates = FEW_LEARNING_RATES
  if learning_rate is not None:
    rates = tuple(np.ravel(learning_rate).tolist())
  if len(rates) == 1:
    arguments["learning_rate"] = rates[0]
  else:
    arguments["sweep.learning_rate"] = rates
  config = _config(arguments, options)
  if epochs is not None and config.epochs <= 0:
    raise ConfigError(f"epochs is {epochs}, expected more than 0, or None.")
  if not rates:
    raise ConfigError("learning_rate is empty, expected numbers or None.")
  with contextlib.ExitStack() as stack:
    stack.enter_context(progress_bar.shown(progress))
    if init is not None:
      if config.task.init:
        raise ConfigError(
          "init and options['task.init'] are both given: expected only one."
        )
      if isinstance(init, Task):
        temporary = tempfile.TemporaryDirectory(prefix="memory-vit-")
        directory = paths.as_path(stack.enter_context(temporary)) / "init"
        store.save_task(init, directory)
        init = directory
      config = config.replaced({"task.init": os.fspath(init)})
    if learning_rate is None:
      listed = ", ".join(f"{rate:g}" for rate in rates)
      logger.info("learning_rate is not given: trying %s", listed)
    splits = _open_splits(
      config, class_names, keys, train=train, validation=validation, test=test
    )
    if validation is None:
      parts = in_memory.hold_out(splits["train"])
      splits["train"], splits["validation"] = parts
    config = _with_intervals(config, splits["train"].size, options)
    return _train(config, splits, backbone, workdir)


def fit_head(
  backbone: Backbone,
  train: Any,
  *,
  name: str,
  kind: str = "classes",
  method: str | None = None,
  validation: Any = None,
  test: Any = None,
  class_names: Sequence[str] = (),
  keys: tuple[str, str] = ("image", "label"),
  batch_size: int = 128,
  seed: int = 0,
  options: Mapping[str, Any] | None = None,
  workdir: str | os.PathLike[str] | None = None,
  progress: bool = True,
) -> TrainResult:
  """Solve a linear head in closed form, like the command with --config=closed.

  Each image passes the backbone once, without random crops. The result is an
  ordinary task of the regime "head".

  Args:
    backbone: backbone from `load_backbone`; it stays unchanged.
    train: training split, see `train_task`; all of it is used.
    name: name of the task, of a-z, 0-9, "-" and "_".
    kind: what the task predicts, see `train_task`.
    method: "lda", linear discriminant analysis, the default for classes and
      only for them; or "ridge", ridge regression, for any kind.
    validation: split for the scores if there is no `test`; by default, scores
      are from a cross-validation within `train`.
    test: split for the final scores.
    class_names: names of classes, labels or values, see `train_task`.
    keys: keys of the image and the label in a dictionary or a table.
    batch_size: images in a pass.
    seed: random seed of the folds of the cross-validation.
    options: options of the command, see `train_task`.
    workdir: directory for the files of the run; by default a temporary one.
    progress: whether to show progress.

  Raises:
    MemoryVitError: for unusable input, such as a class without images, or
      features that are all equal or not finite.
  """
  arguments = _arguments(backbone, name, kind, "head", batch_size, seed)
  arguments |= {
    "optim.name": method or KINDS[kind].closed_forms[0],
    "total_steps": 1,
    "data.train_crop": "resize",
    "data.flip": False,
    "cache.what": "features",
  }
  config = _config(arguments, options or {})
  with progress_bar.shown(progress):
    splits = _open_splits(
      config, class_names, keys, train=train, validation=validation, test=test
    )
    return _train(config, splits, backbone, workdir)


def _arguments(
  backbone: Backbone,
  name: str,
  kind: str,
  regime: str,
  batch_size: int,
  seed: int,
) -> dict[str, Any]:
  """Check arguments of a public function; return {option: value} for a run."""
  if not isinstance(backbone, Backbone):
    raise BackboneError(
      f"the backbone is of type {type(backbone).__name__}, expected a backbone "
      "from mv.load_backbone."
    )
  # Raise for an unknown kind here, before any data are read.
  TaskKind(name=kind)
  if not is_name(name):
    raise ConfigError(f"name is {messages.brief(name)}: expected {NAME_RULE}.")
  return {
    "backbone": f"python:{backbone.config.variant}",
    "image_size": backbone.config.image_size,
    "dtype": backbone.config.dtype,
    "task.name": name,
    "task.kind": kind,
    "regime": regime,
    "batch_size": batch_size,
    "seed": seed,
  }


def _open_splits(
  config: Config,
  class_names: Sequence[str],
  keys: tuple[str, str],
  **split_data: Any,
) -> dict[str, Split]:
  """Return {split name: open split}.

  `train` must be the first split in `split_data`: its class names are used for
  the other splits.
  """
  splits: dict[str, Split] = {}
  for split, data in split_data.items():
    if data is not None:
      splits[split] = in_memory.open_data(
        data, config.task.name, split, class_names, keys, config.task.kind
      )
      class_names = splits["train"].class_names
  return splits


def _train(
  config: Config,
  splits: Mapping[str, Split],
  backbone: Backbone,
  workdir: str | os.PathLike[str] | None,
) -> TrainResult:
  """Run a configuration on splits; return the result of the best trial."""
  with contextlib.ExitStack() as stack:
    history = None
    if workdir is None:
      # Keep metrics in memory, because the temporary directory is deleted.
      history = metric_writers.History()
      temporary = tempfile.TemporaryDirectory(prefix="memory-vit-")
      workdir = stack.enter_context(temporary)
    directory = paths.place(workdir, "workdir")
    result = run.train_and_evaluate(
      config, directory, splits=splits, backbone=backbone, history=history
    )
    best = result.tasks[0]
    trial = sweep.Trial(best.name, best.varied, config)
    return TrainResult(
      task=store.load_task(directory / "tasks" / config.task.name, backbone),
      scores=best.test if "test" in splits else best.val,
      history=(
        history.curves(best.name)
        if history
        else _read_history(sweep.logdir_of(trial, directory))
      ),
      trials=result.tasks,
    )


def evaluate_tasks(
  backbone: Backbone,
  tasks: TasksLike,
  data: Any,
  *,
  keys: tuple[str, str] = ("image", "label"),
  batch_size: int = 128,
  progress: bool = True,
) -> dict[str, Scores]:
  """Evaluate tasks, all in one pass.

  Args:
    backbone: backbone of the tasks.
    tasks: tasks that share a pass, with all tasks that they attend to; or one
      task of any regime.
    data: a split for all tasks, or {task name: its split}; see `train_task`. A
      split that several tasks share is read once.
    keys: keys of the image and the label in a dictionary or a table.
    batch_size: images in a batch.
    progress: whether to show progress.

  Returns:
    {task name: its scores}, for the tasks that have data.

  Raises:
    MemoryVitError: for unusable input, or if a task and its data have different
      classes.
  """
  tasks = task_tuple(tasks)
  by_name = {task.name: task for task in tasks}
  for task in tasks:
    require_backbone(task.spec, backbone.id)
  require_one_pass(tasks)
  mesh = sharding.make_mesh()
  batch_size = schema.whole_number("batch_size", batch_size, 1, ConfigError)
  sharding.require_divisible(batch_size, mesh, "batch_size")
  if not isinstance(data, Mapping) or (
    {*keys} <= data.keys() and not data.keys() & by_name.keys()
  ):
    data = dict.fromkeys(by_name, data)
  if not data:
    raise TaskError("data is empty: expected a split, or {task name: split}.")
  if unknown := [repr(name) for name in data if name not in by_name]:
    raise TaskError(
      f"data has the keys {messages.name_list(unknown)}, but the tasks are "
      f"{', '.join(by_name)}: expected {{task name: split}}, or one split with "
      f"the keys {', '.join(keys)}."
    )
  params = sharding.put_backbone(backbone.params, mesh)
  placed = dataclasses.replace(backbone, params=params)
  with progress_bar.shown(progress):
    # Open all data first, to refuse a wrong split before any evaluation.
    opened: dict[tuple[int, str], tuple[Split, list[str]]] = {}
    for name, split in data.items():
      spec = by_name[name].spec
      names = spec.class_names or tuple(map(str, range(spec.num_classes)))
      key = id(split), spec.kind.name
      if key not in opened:
        read = in_memory.open_data(split, name, "data", names, keys, key[1])
        opened[key] = read, []
      source, sharing = opened[key]
      sharing.append(name)
      if spec.class_names:
        task_data.require_classes(by_name[name], source)
    evaluations: dict[str, Evaluation] = {}
    for source, sharing in opened.values():
      evaluations |= evaluate.evaluate_source(
        evaluate.predict_fn(placed, tasks, mesh, outputs=sharing),
        source,
        tasks[0].spec.preprocessing,
        batch_size=batch_size,
        mesh=mesh,
        kinds={name: by_name[name].spec.kind for name in sharing},
      )
  return {
    name: evaluations[name].scores for name in by_name if name in evaluations
  }


def _read_history(
  logdir: Path,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Return {tag: (steps, values)} of a trial; {} if event files are missing."""
  try:
    return runs.read_scalars(logdir)
  except TrainingError as error:
    logger.warning("the result has no history: %s", error)
    return {}


def _config(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Config:
  """Return the configuration of a run, from `arguments` and `options`."""
  for key in options:
    if key in arguments or key in ("epochs", "gelu"):
      raise ConfigError(
        f"options: {key!r} is set by an argument, by the function itself or by "
        "the backbone: leave it out of options."
      )
  batch = {"batch_size_eval": arguments["batch_size"]}
  values = {"log_images": 0, "export_orbax": False, **batch, **arguments}
  values |= options
  return Config().replaced({key: _plain(v) for key, v in values.items()})


def _plain(value: Any) -> Any:
  """Convert a NumPy scalar to a Python number; return other values as is."""
  return value.item() if isinstance(value, np.generic) else value


def _with_intervals(
  config: Config, examples: int, options: Mapping[str, Any]
) -> Config:
  """Return `config` with default values for intervals that `options` omits."""
  steps = settle.steps_of(config, examples)
  every = min(math.ceil(steps / _VALIDATIONS), _MOST_REPEATED)
  values = {
    "eval_every": every,
    "checkpoint_every": every,
    "log_every": math.ceil(steps / _POINTS),
  }
  return config.replaced({**values, **options})

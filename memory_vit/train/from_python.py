"""Train and evaluate tasks by one call each, on data in Python.

It makes a configuration, opens data, and runs what the commands `train` and
`evaluate` run.
"""

# Annotations stay text: the extra `train` may not be installed.
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

# Number of validations and of logged training losses; the largest number of
# steps that a resumed run repeats.
_VALIDATIONS, _POINTS = 5, 20
_MOST_REPEATED = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """A trained task with its scores and history.

  Attributes:
    task: of the best trial on the validation split.
    scores: of this task. On the test split if one was given, else on the
      validation split, which chose the task and therefore flatters it; of
      `fit_head` without either, by cross-validation, or empty if a class has a
      single image. Loss and calibration error are at the temperature of the
      task on the test split, and at 1 on others.
    history: of this trial, {"train/loss": (steps, values), "validation/top1":
      ...}, with the names that TensorBoard shows.
    trials: the numbers of every trial, the best on validation first.
  """

  task: Task
  scores: Scores
  history: Mapping[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
    repr=False
  )
  trials: tuple[TrialResult, ...] = dataclasses.field(repr=False)

  @property
  def score(self) -> float | None:
    """Accuracy of classes, mean average precision of labels, R2 of values.

    None if no output was finite.
    """
    return self.scores.score

  @property
  def accuracy(self) -> float | None:
    """`scores.accuracy`, of classes alone."""
    return self.scores.accuracy


def train_and_evaluate(
  config: Config,
  workdir: str | os.PathLike[str],
  stop: StopSignal | None = None,
) -> RunResult:
  """Train a task or a sweep, or resume a run, as `memory-vit train` does.

  Args:
    config: of the run, from `read_config`.
    workdir: for the result, tasks, saved states and logs, local or in a bucket
      (gs://BUCKET/DIRECTORY); it is made if it does not exist.
    stop: asks a run that trains to save its state and stop.

  Returns:
    The content of `result.json`.

  Raises:
    MemoryVitError: for unusable input, and if another run is using `workdir`.
    Interrupted: if `stop` asked for it.
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
  """Train a task, by the same run as the command `memory-vit train`.

  A split is (images, labels); a table of pandas, Polars or Arrow with columns
  `keys`; a tf.data (not batched), torch or Hugging Face data set, or any other
  sequence or iterable, of pairs (image, label) or of dictionaries with `keys`;
  or the folder DATA/train or DATA/test with a folder of images for each class.
  All but folders are read into memory, once.

  An image is the path or the bytes of an image file; an image of Pillow; or
  pixels (h, w, 3), (h, w) or (h, w, 4), of which alpha is dropped, or (3, h,
  w): integers from 0 to 255, or floating point from 0 to 1. Sizes may differ:
  training crops at random and mirrors (see `options`), and evaluation has
  `task.spec.preprocessing`. A label is an integer from 0, or the name of a
  class; for the kind "labels" a list of these, or an array with a 0 or 1 for
  each label; for the kind "values" a number or a vector of numbers.

  Args:
    backbone: from `load_backbone`; it stays unchanged.
    train: the training split.
    name: of the task: a-z, 0-9, "-" and "_".
    kind: what the task predicts: "classes", one of several; "labels", any
      number of several; "values", numbers (regression).
    validation: the split on which the best step and trial are chosen; by
      default a tenth of `train`, which is held out.
    test: the split for the result.
    class_names: of classes, labels or values; by default those of the data,
      else the names among the training labels, sorted, else "0", "1", ...
    keys: of the image and the label in a dictionary.
    regime: what is trained, see `regimes`.
    cells: memory cells per layer, in the regimes that have memory.
    epochs: passes over the training split; by default 50, or as many as take
      25 steps if that is more.
    learning_rate: the peak. Several are trials, which share every pass in
      the regimes that allow it; by default 0.03, 0.3 and 1.
    batch_size: images per step.
    seed: for initialization and data shuffling.
    init: a task of the regime "head" with the same classes, such as from
      `fit_head`, or its path: training begins with its head. Give both calls
      the same `train` and `validation`: images that the head has seen would
      flatter it.
    options: of the command: {"data.flip": False} is its
      --config.data.flip=false.
    workdir: for the files of the run; the same call resumes it. By default a
      temporary directory.
    progress: whether to show progress.

  Compiled programs are cached on disk, in ~/.cache/memory_vit/xla unless JAX
  has another cache: a later process with the same shapes starts sooner.

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
    raise ConfigError("learning_rate is empty, expected some, or None.")
  with contextlib.ExitStack() as stack:
    stack.enter_context(progress_bar.shown(progress))
    if init is not None:
      if config.task.init:
        raise ConfigError("init and options['task.init'] are both given.")
      if isinstance(init, Task):
        made = tempfile.TemporaryDirectory(prefix="memory-vit-")
        directory = paths.as_path(stack.enter_context(made)) / "init"
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
  """Solve a linear head in closed form, as the command with --config=closed.

  Each image passes the backbone once, without random crops. The task is one of
  the regime "head", as any other.

  Args:
    backbone: from `load_backbone`; it stays unchanged.
    train: the training split, see `train_task`; all of it is used.
    name: of the task: a-z, 0-9, "-" and "_".
    kind: what the task predicts, see `train_task`.
    method: "lda", linear discriminant analysis, of classes, their default; or
      "ridge", ridge regression, of any kind.
    validation: a split for the scores, if there is no `test`; by default a
      cross-validation within `train`.
    test: the split for the result.
    class_names: of classes, labels or values, see `train_task`.
    keys: of the image and the label in a dictionary.
    batch_size: images in a pass.
    seed: of the folds of the cross-validation.
    options: of the command, see `train_task`.
    workdir: for the files of the run; by default a temporary directory.
    progress: whether to show progress.

  Raises:
    MemoryVitError: for unusable input, such as a class without images, or
      features that are not finite or all the same.
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
  """Options of a run for arguments of a function, which are checked first."""
  if not isinstance(backbone, Backbone):
    raise BackboneError(
      f"the backbone is of type {type(backbone).__name__}, expected one from "
      "mv.load_backbone."
    )
  TaskKind(name=kind)  # an unknown one is refused before data are read
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
  """Open the splits that are given, "train" first, which names the classes."""
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
  """Run a configuration on splits; its best task, scores and history."""
  with contextlib.ExitStack() as stack:
    history = None
    if workdir is None:
      history = metric_writers.History()  # events would go with the directory
      made = tempfile.TemporaryDirectory(prefix="memory-vit-")
      workdir = stack.enter_context(made)
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
    backbone: of the tasks.
    tasks: that share a pass, with all that they attend to; or one task of any
      regime.
    data: a split for all tasks, or {task name: its split}; see `train_task`. A
      split that several tasks share is read once.
    keys: of the image and the label in a dictionary.
    batch_size: images in a batch.
    progress: whether to show progress.

  Returns:
    {task name: its scores}, of the tasks that have data.

  Raises:
    MemoryVitError: for unusable input, and data with other classes than a task
      has.
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
    raise TaskError("the data are empty: expected a split, or some by task.")
  if unknown := [repr(name) for name in data if name not in by_name]:
    raise TaskError(
      f"the data name no task {messages.name_list(unknown)}; the tasks are "
      f"{', '.join(by_name)} (a split in a dictionary has the keys "
      f"{', '.join(keys)})."
    )
  params = sharding.put_backbone(backbone.params, mesh)
  placed = dataclasses.replace(backbone, params=params)
  with progress_bar.shown(progress):
    # All data are opened first: a wrong split must not cost an evaluation.
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
    found: dict[str, Evaluation] = {}
    for source, sharing in opened.values():
      found |= evaluate.evaluate_source(
        evaluate.predict_fn(placed, tasks, mesh, outputs=sharing),
        source,
        tasks[0].spec.preprocessing,
        batch_size=batch_size,
        mesh=mesh,
        kinds={name: by_name[name].spec.kind for name in sharing},
      )
  return {name: found[name].scores for name in by_name if name in found}


def _read_history(
  logdir: Path,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """The events of a trial; none if they could not be written, or are gone."""
  try:
    return runs.read_scalars(logdir)
  except TrainingError as error:
    logger.warning("the result has no history: %s", error)
    return {}


def _config(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Config:
  """The configuration of a run, from arguments and options of `train_task`."""
  for key in options:
    if key in arguments or key in ("epochs", "gelu"):
      raise ConfigError(
        f"options: {key!r} is set by an argument, by the function itself, or "
        "by the backbone."
      )
  batch = {"batch_size_eval": arguments["batch_size"]}
  values = {"log_images": 0, "export_orbax": False, **batch, **arguments}
  values |= options
  return Config().replaced({key: _plain(v) for key, v in values.items()})


def _plain(value: Any) -> Any:
  """A number of Python for one of NumPy."""
  return value.item() if isinstance(value, np.generic) else value


def _with_intervals(
  config: Config, examples: int, options: Mapping[str, Any]
) -> Config:
  """Set the steps between evaluations, states and lines, but for `options`."""
  steps = settle.steps_of(config, examples)
  every = min(math.ceil(steps / _VALIDATIONS), _MOST_REPEATED)
  values = {
    "eval_every": every,
    "checkpoint_every": every,
    "log_every": math.ceil(steps / _POINTS),
  }
  return config.replaced({**values, **options})

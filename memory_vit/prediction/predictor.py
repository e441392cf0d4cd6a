"""Answer images by tasks in slots; all threads share one predictor."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from memory_vit.errors import ConfigError, DataError
from memory_vit.images.reader import ImageReader, Images, stacked
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import (
  EvalPreprocessing,
  Task,
  require_backbone,
)
from memory_vit.prediction import columns, task_set
from memory_vit.prediction.checked_pixels import checked_pixels, stacked_column
from memory_vit.prediction.config import PredictorConfig
from memory_vit.prediction.fixed_shapes import FixedShapes
from memory_vit.prediction.predictions import Predictions
from memory_vit.prediction.set_maker import SetMaker
from memory_vit.prediction.task_set import Change, TaskSet
from memory_vit.runtime import options as options_lib
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.tasks.compose import TasksLike, task_tuple
from memory_vit.tasks.model_loading import load_model

Columns = Mapping[str, Any]
# Options of `from_model`: all fields of `PredictorConfig`, except those
# that are only for loading the backbone and the tasks.
_OPTIONS = tuple(
  field.name
  for field in dataclasses.fields(PredictorConfig)
  if field.name not in ("backbone", "tasks", "dtype", "image_size")
)


class Predictor:
  """Answers images by all tasks in one pass; tasks can be added and removed.

  Programs have fixed shapes: images are padded to one of a few batch sizes, and
  tasks lie in slots. After `warm_up`, nothing is compiled as long as tasks fit
  into the slots. A task of a regime that does not compose (such as `probe` or
  `full`) must be the only task, and runs in its own pass. All methods may be
  called from any thread.

  Attributes:
    config: the configuration; None if `from_model` built the predictor.
    backbone: the frozen ViT.
    batch_sizes: images per pass, ascending.
  """

  config: PredictorConfig | None
  backbone: Backbone
  batch_sizes: tuple[int, ...]

  def __init__(self, config: PredictorConfig, *, warm_up: bool = True) -> None:
    """Load a backbone and tasks; `warm_up` compiles all programs now.

    Raises:
      MemoryVitError: if backbone or tasks cannot be read or combined.
    """
    backbone, tasks = load_model(
      config.backbone,
      config.tasks,
      config.dtype,
      any_regime=True,
      image_size=config.image_size or None,
    )
    self._begin(backbone, tasks, config)
    self.config = config
    if warm_up:
      self.warm_up()

  @classmethod
  def from_model(
    cls,
    backbone: Backbone,
    tasks: TasksLike = (),
    *,
    warm_up: bool = True,
    **options: Any,
  ) -> Predictor:
    """Build a predictor from a loaded backbone and tasks.

    Args:
      backbone: the frozen ViT.
      tasks: a task, a sequence or generator of tasks, or {name: task}.
      warm_up: whether to compile all programs now.
      **options: fields of `PredictorConfig`, from `batch_sizes` on.

    Raises:
      TaskError: if tasks are of another backbone, or cannot be combined.
      ConfigError: for an unknown option or an invalid value.
    """
    for name in ("dtype", "image_size"):
      if name in options:
        raise ConfigError(
          f"{name} cannot be given with a loaded backbone, because it is set "
          f"at loading: call load_backbone(..., {name}=...) instead."
        )
    if unknown := options.keys() - set(_OPTIONS):
      raise ConfigError(
        options_lib.unknown("the predictor", min(unknown), _OPTIONS)
      )
    shapes = PredictorConfig(backbone.config.variant, **options)
    predictor = cls.__new__(cls)
    predictor._begin(backbone, task_tuple(tasks), shapes)
    predictor.config = None
    if warm_up:
      predictor.warm_up()
    return predictor

  def _begin(
    self, backbone: Backbone, tasks: Sequence[Task], shapes: PredictorConfig
  ) -> None:
    self.backbone, self.batch_sizes = backbone, shapes.batch_sizes
    self._shapes = shapes
    self._programs = FixedShapes(backbone, shapes.batch_sizes)
    self._maker = SetMaker(backbone, self._programs, shapes)
    self._task_set = self._maker.first(tasks)
    self._changing = threading.Lock()
    side = backbone.config.image_size
    self._images = ImageReader(
      shapes.memory_mib, shapes.batch_sizes[-1], side, checked=checked_pixels
    )

  def __reduce__(self) -> NoReturn:
    raise pickle.PicklingError(
      "a Predictor cannot be pickled, because it holds threads and arrays on a "
      "device: hand its config over, and build another Predictor from it."
    )

  @property
  def task_set(self) -> TaskSet:
    """The tasks that answer now, as a snapshot that never changes."""
    return self._task_set

  @property
  def preprocessing(self) -> EvalPreprocessing:
    """Preprocessing of the current tasks or, without tasks, of the backbone."""
    return self._task_set.preprocessing

  @property
  def compilations(self) -> int:
    """Number of programs compiled so far, except by `warm_up`."""
    return self._maker.counter.count

  @property
  def compiled_sizes(self) -> tuple[int, ...]:
    """Batch sizes that are compiled for the current tasks, ascending.

    Requests use only these sizes. Before `warm_up` there are none, and each
    size is compiled at its first use.
    """
    return self._maker.compiled(self._task_set)

  def warm_up(self, count: int | None = None) -> int:
    """Compile the programs of all batch sizes; return the number of programs.

    Other threads may predict and change tasks meanwhile.

    Args:
      count: number of batch sizes, the smallest first; by default all.
    """
    sizes = self.batch_sizes[:count]
    compiled = 0
    with ProgressBar("compiling", len(sizes), "batch sizes") as bar:
      # Other threads may change the tasks: after each compilation, list the
      # missing sizes again.
      while missing := [s for s in sizes if s not in self.compiled_sizes]:
        compiled += self._maker.compile(self._task_set, missing[0])
        bar.update()
    return compiled

  def prepare(
    self, images: Images, *, task_set: TaskSet | None = None
  ) -> np.ndarray:
    """Prepare images for `predict_pixels`, in threads.

    `mv.preprocess` gives bitwise identical results. All prepared images are in
    memory, 12 bytes per pixel; `predict` holds only one batch at a time.

    Args:
      images: one or several: paths, bytes of files, uint8 pixels of any size,
        or prepared images, floats (side, side, 3) in [-1, 1].
      task_set: a snapshot to prepare images for; by default the current tasks.

    Returns:
      float32 (k, side, side, 3) in [-1, 1].

    Raises:
      DataError: for the first image that cannot be read.
    """
    prepared = self.prepare_each(images, task_set=task_set)
    return stacked(prepared, self.backbone.config.image_size)

  def prepare_each(
    self,
    images: Images,
    first: int = 0,
    *,
    task_set: TaskSet | None = None,
    large: bool | None = None,
  ) -> list[np.ndarray | DataError]:
    """Prepare images; return a `DataError` for each unreadable image.

    Args:
      images: see `prepare`.
      first: number of the first image, for messages.
      task_set: see `prepare`.
      large: whether to use the threads for large images, so that other images
        need not wait; by default, the size of each image decides.

    Returns:
      For each image float32 (side, side, 3), or a `DataError` that names it.
    """
    answering, _ = self._answering(task_set, ())
    return self._images.each(
      images, answering.preprocessing, first, large=large
    )

  def predict(
    self,
    images: Images,
    *,
    tasks: Iterable[str] | None = None,
    task_set: TaskSet | None = None,
    features: bool = False,
    original: bool = False,
  ) -> Predictions:
    """Answer images.

    Args:
      images: see `prepare`; any number.
      tasks: names of the tasks whose logits are returned; by default all.
      task_set: an earlier snapshot; by default the current tasks.
      features: whether to return the features of each block. They take a second
        pass through the backbone.
      original: whether to return the original outputs. They take a second pass
        if the task does not compose.

    Raises:
      DataError: for an image that cannot be read.
      UnknownTask: for a name that no task has.
    """
    # Check the task names first, so an unknown name fails before decoding.
    answering, names = self._answering(task_set, tasks)
    batches = self._images.batches(images, answering.preprocessing)
    return self._predict(
      batches, answering, names, original=original, features=features
    )

  def predict_pixels(
    self,
    pixels: np.ndarray,
    *,
    tasks: Iterable[str] | None = None,
    task_set: TaskSet | None = None,
    features: bool = False,
    original: bool = False,
  ) -> Predictions:
    """Answer prepared images.

    Args:
      pixels: float32 (k, side, side, 3) in [-1, 1], for any k.
      tasks: see `predict`.
      task_set: see `predict`.
      features: see `predict`.
      original: see `predict`.

    Raises:
      DataError: for another shape or type, and for values that are not finite
        or outside [-1, 1].
      UnknownTask: for a name that no task has.
    """
    answering, names = self._answering(task_set, tasks)
    checked = checked_pixels(pixels, self.backbone.config.image_size)
    return self._predict(
      [checked], answering, names, original=original, features=features
    )

  def __call__(self, images: Images | Columns) -> Any:
    """Return predictions for images, or for columns of a table.

    Args:
      images: see `prepare`; or columns as `map_batches` of Ray Data passes
        them: {"image": bytes of files or uint8 arrays}, {"path": ...} or
        {"pixels": prepared images}. Other columns are passed through.

    Returns:
      `Predictions`; or, for columns, see `columns.prediction_columns`.

    Raises:
      DataError: for an image that cannot be read.
    """
    if not isinstance(images, Mapping):
      return self.predict(images)
    read = columns.image_column(images)
    column, answering = images[read], self._task_set
    batches: Iterable[np.ndarray]
    if read == "pixels":
      side = self.backbone.config.image_size
      batches = [checked_pixels(stacked_column(column), side)]
    else:
      batches = self._images.batches(list(column), answering.preprocessing)
    predictions = self._predict(
      batches,
      answering,
      answering.names,
      original=False,
      features=self._shapes.features,
    )
    predicted = columns.prediction_columns(predictions, self._shapes.top)
    return columns.joined(columns.passed_through(images, read), predicted)

  def add(self, task: str | Path | Task, *, name: str | None = None) -> Change:
    """Add a task in the first free slot.

    Args:
      task: a loaded task, or the path of one.
      name: new name of the task; by default its own.

    Raises:
      TaskError: if the task cannot be read, its name is taken, or it does not
        fit the other tasks. Nothing has changed then.
    """
    loaded = self._maker.loaded(task)
    if name is not None:
      loaded = task_set.named(loaded, name)
    with self._changing:
      by_slot = task_set.with_added(self._task_set.by_slot, loaded)
      return self._show(by_slot)

  def replace(self, name: str, task: str | Path | Task) -> Change:
    """Replace a task by another task, which gets the name of the old task.

    Each request is answered by the old or the new task, never by both.

    Args:
      name: name of the task to replace.
      task: a loaded task, or the path of one; of any size.

    Raises:
      UnknownTask: if no task has this name.
      TaskError: see `add`; also if other tasks attend to the old parameters.
    """
    self._task_set.require((name,))
    loaded = self._maker.loaded(task)
    with self._changing:
      by_slot = task_set.with_replaced(self._task_set.by_slot, name, loaded)
      return self._show(by_slot)

  def remove(self, name: str) -> Change:
    """Remove a task, and free its slot.

    Raises:
      UnknownTask: if no task has this name.
      TaskError: if other tasks attend to this task.
    """
    with self._changing:
      return self._show(task_set.without(self._task_set.by_slot, name))

  def make_ready(self, by_slot: Mapping[int, Task]) -> tuple[TaskSet, Change]:
    """Make a new set of tasks ready, without letting it answer yet.

    Its programs are compiled if they are new. Requests can choose the set by
    `task_set=`; `show` makes it the default. Thus, predictors in several
    processes can switch to a new set after it is ready in all of them.

    Args:
      by_slot: {slot: loaded task}; heads are in the slots -1, -2, ....

    Returns:
      The new set, and a description of the change.

    Raises:
      TaskError: if tasks are of another backbone, or cannot be combined.
    """
    held = {id(task) for task in self._task_set.by_slot.values()}
    loaded = {
      slot: task if id(task) in held else self._maker.loaded(task)
      for slot, task in by_slot.items()
    }
    with self._changing:
      fitting = task_set.fitting(loaded)
      return self._maker.made_ready(self._task_set, fitting)

  def show(self, ready: TaskSet) -> None:
    """Let a set from `make_ready` answer from now on; nothing is compiled."""
    with self._changing:
      self._task_set = ready

  def _answering(
    self, task_set: TaskSet | None, names: Iterable[str] | None
  ) -> tuple[TaskSet, tuple[str, ...]]:
    """Return (task set to use, names of the requested tasks); check both."""
    answering = task_set or self._task_set
    for spec in answering.specs[:1]:  # all tasks have the same backbone
      require_backbone(spec, self.backbone.id)
    if names is None:
      return answering, answering.names
    return answering, answering.require(names)

  def _show(self, by_slot: Mapping[int, Task]) -> Change:
    ready, change = self._maker.made_ready(self._task_set, by_slot)
    self._task_set = ready
    return change

  def _predict(
    self,
    batches: Iterable[np.ndarray],
    answering: TaskSet,
    names: tuple[str, ...],
    *,
    original: bool,
    features: bool,
  ) -> Predictions:
    with self._maker.counter.counting():
      outputs = self._programs.run(
        batches,
        answering.program,
        answering.heads(names),
        original=original,
        features=features,
      )
    return Predictions(answering, *outputs)

"""The predictor: tasks in slots behind one door, which threads share."""

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
from memory_vit.tasks.compose import TasksLike, task_tuple
from memory_vit.tasks.model_loading import load_model

Columns = Mapping[str, Any]
# Of `from_model`: what says nothing about what is loaded.
_OPTIONS = tuple(
  field.name
  for field in dataclasses.fields(PredictorConfig)
  if field.name not in ("backbone", "tasks", "dtype", "image_size")
)


class Predictor:
  """Answers images by all tasks in one pass, while tasks come and go.

  Programs have fixed shapes: images are padded to one of a few batch sizes, and
  tasks lie in slots. After `warm_up` nothing is compiled as long as tasks fit.
  A task that composes with nothing (of `probe`, `full`, ...) is answered as
  well, alone: in a pass of its own, to which no other task can be added. All
  methods may be called from any thread.

  Attributes:
    config: what it was built from; None of `from_model`.
    backbone: the frozen ViT.
    batch_sizes: images per pass, ascending.
  """

  config: PredictorConfig | None
  backbone: Backbone
  batch_sizes: tuple[int, ...]

  def __init__(self, config: PredictorConfig, *, warm_up: bool = True) -> None:
    """Load a backbone and tasks.

    Args:
      config: which, and in what shapes.
      warm_up: whether all programs are compiled now.

    Raises:
      MemoryVitError: for what cannot be read, or does not fit together.
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
    """Build a predictor of what is loaded already.

    Args:
      backbone: the frozen ViT.
      tasks: a task, a sequence or generator of tasks, or {name: task}; also
        none.
      warm_up: whether all programs are compiled now.
      **options: fields of `PredictorConfig`, from `batch_sizes` on.

    Raises:
      TaskError: for tasks of another backbone, or that do not fit together.
      ConfigError: for options that cannot be.
    """
    for name in ("dtype", "image_size"):
      if name in options:
        raise ConfigError(
          f"{name} is that of the backbone: expected none beside it; "
          f"load_backbone(..., {name}=...) sets it."
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
      "a Predictor holds threads and what is on a device: hand its config over "
      "and build another from it."
    )

  @property
  def task_set(self) -> TaskSet:
    """The tasks that answer now: a snapshot, which never changes."""
    return self._task_set

  @property
  def evaluation(self) -> EvalPreprocessing:
    """How images are prepared now: as the tasks want it, or the backbone."""
    return self._task_set.evaluation

  @property
  def compilations(self) -> int:
    """Programs that it had XLA compile, those of `warm_up` excepted."""
    return self._maker.counter.count

  def warm_up(self) -> int:
    """Compile the programs of all batch sizes.

    Returns:
      How many programs were compiled.
    """
    with self._changing:
      return self._maker.warm_up(self._task_set)

  def prepare(
    self, images: Images, *, task_set: TaskSet | None = None
  ) -> np.ndarray:
    """Prepare images for `predict_pixels`, in threads.

    To the bit what `mv.preprocess` makes of them. All of them are kept, 12
    bytes a pixel; `predict` keeps a batch at a time.

    Args:
      images: one or several: paths, bytes of files, uint8 pixels of any size,
        or what is prepared already, floats (side, side, 3) in [-1, 1].
      task_set: a snapshot, which is to answer them; by default the tasks of
        now.

    Returns:
      float32 (k, side, side, 3) in [-1, 1].

    Raises:
      DataError: for what cannot be read, and says which and why.
    """
    found = self.prepare_each(images, task_set=task_set)
    return stacked(found, self.backbone.config.image_size)

  def prepare_each(
    self, images: Images, first: int = 0, *, task_set: TaskSet | None = None
  ) -> list[np.ndarray | DataError]:
    """Prepare images; in the place of one that cannot be read is its error.

    Args:
      images: as of `prepare`.
      first: number of the first image, for messages.
      task_set: see `prepare`.

    Returns:
      For each image float32 (side, side, 3), or a `DataError` that names it.
    """
    answering, _ = self._answering(task_set, ())
    return self._images.each(images, answering.evaluation, first)

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
      images: as of `prepare`; any number.
      tasks: names of those whose logits are handed out; by default all.
      task_set: an earlier snapshot; by default the tasks of now.
      features: whether those of each block are handed out. They are made by a
        second pass through the backbone.
      original: whether the original outputs are handed out. Beside a task that
        composes with nothing they are made by a second pass as well.

    Raises:
      DataError: for an image that cannot be read.
      UnknownTask: for a name that no task has.
    """
    # Before images are decoded for nothing.
    answering, names = self._answering(task_set, tasks)
    batches = self._images.batches(images, answering.evaluation)
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
    """Answer prepared images; see `predict`.

    Args:
      pixels: float32 (k, side, side, 3) in [-1, 1], of any k.
      tasks: see `predict`, as all others.
      task_set: an earlier snapshot.
      features: whether those of each block are handed out.
      original: whether the original outputs are handed out.

    Raises:
      DataError: for another shape or type, and values outside [-1, 1] or that
        are not finite.
      UnknownTask: for a name that no task has.
    """
    answering, names = self._answering(task_set, tasks)
    checked = checked_pixels(pixels, self.backbone.config.image_size)
    return self._predict(
      [checked], answering, names, original=original, features=features
    )

  def __call__(self, images: Images | Columns) -> Any:
    """Answer images, or columns of a table.

    Args:
      images: as of `prepare`; or columns as `map_batches` of Ray Data hands
        them over: {"image": bytes of files or uint8 arrays}, {"path": ...} or
        {"pixels": prepared images}. Other columns are kept.

    Returns:
      `Predictions`; of columns the columns of `columns.prediction_columns`.

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
      batches = self._images.batches(list(column), answering.evaluation)
    predictions = self._predict(
      batches,
      answering,
      answering.names,
      original=False,
      features=self._shapes.features,
    )
    made = columns.prediction_columns(predictions, self._shapes.top)
    return columns.joined(columns.passed_through(images, read), made)

  def add(self, task: str | Path | Task, *, name: str | None = None) -> Change:
    """Add a task, in the first slot that is free.

    Args:
      task: a loaded one, or the path of one.
      name: that it gets; by default its own.

    Raises:
      TaskError: for what cannot be read, a name that is taken, or a task that
        does not fit those that are there. Nothing has changed then.
    """
    loaded = self._maker.loaded(task)
    if name is not None:
      loaded = task_set.named(loaded, name)
    with self._changing:
      by_slot = task_set.with_added(self._task_set.by_slot, loaded)
      return self._show(by_slot)

  def replace(self, name: str, task: str | Path | Task) -> Change:
    """Put a task in the place of another, whose name and slot it gets.

    Each request sees the one or the other.

    Args:
      name: of the one that goes.
      task: a loaded one, or the path of one; of any size.

    Raises:
      UnknownTask: where there is none of this name.
      TaskError: as `add`; and where others read the values that go.
    """
    self._task_set.require((name,))
    loaded = self._maker.loaded(task)
    with self._changing:
      by_slot = task_set.with_replaced(self._task_set.by_slot, name, loaded)
      return self._show(by_slot)

  def remove(self, name: str) -> Change:
    """Remove a task; its slot is free then.

    Raises:
      UnknownTask: where there is none of this name.
      TaskError: where others read it.
    """
    with self._changing:
      return self._show(task_set.without(self._task_set.by_slot, name))

  def make_ready(
    self, by_slot: Mapping[int, Task], version: int
  ) -> tuple[TaskSet, Change]:
    """Make a whole set of tasks ready, which does not answer yet.

    It is compiled where it has to grow, and can be asked by `task_set=`; `show`
    lets it answer. So several predictors, in as many processes, can change from
    one set to another only where all of them can.

    Args:
      by_slot: {slot: loaded task}.
      version: that the set gets.

    Returns:
      The set, and what the change to it would be.

    Raises:
      TaskError: for tasks of another backbone, or that do not fit together.
    """
    held = {id(task) for task in self._task_set.by_slot.values()}
    loaded = {
      slot: task if id(task) in held else self._maker.loaded(task)
      for slot, task in by_slot.items()
    }
    with self._changing:
      fitting = task_set.fitting(loaded)
      return self._maker.made_ready(self._task_set, fitting, version)

  def show(self, ready: TaskSet) -> None:
    """Let a set of `make_ready` answer from now on; nothing is compiled."""
    with self._changing:
      self._task_set = ready

  def _answering(
    self, task_set: TaskSet | None, names: Iterable[str] | None
  ) -> tuple[TaskSet, tuple[str, ...]]:
    """The set that answers, and the names that are asked for: it has them."""
    answering = task_set or self._task_set
    for spec in answering.specs[:1]:  # that of all
      require_backbone(spec, self.backbone.id)
    if names is None:
      return answering, answering.names
    return answering, answering.require(names)

  def _show(self, by_slot: Mapping[int, Task]) -> Change:
    """Make a set of tasks ready, and then the one that answers."""
    old = self._task_set
    ready, change = self._maker.made_ready(old, by_slot, old.version + 1)
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
    """Answer prepared images by a set of tasks."""
    with self._maker.counter.counting():
      outputs = self._programs.run(
        batches,
        answering.program,
        answering.heads(names),
        original=original,
        features=features,
      )
    return Predictions(answering, *outputs)

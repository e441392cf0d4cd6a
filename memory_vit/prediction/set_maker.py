"""Load tasks for a backbone, and make sets of tasks ready to answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax

from memory_vit.errors import TaskError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import (
  EvalPreprocessing,
  Task,
  TaskSpec,
  require_backbone,
)
from memory_vit.prediction import task_set
from memory_vit.prediction.compilations import CompilationCounter, counted
from memory_vit.prediction.config import PredictorConfig
from memory_vit.prediction.fixed_shapes import FixedShapes
from memory_vit.prediction.task_set import Change, TaskSet
from memory_vit.tasks import find, manifest, store
from memory_vit.tasks.program import Program, place_tasks
from memory_vit.tasks.slots import SlotSizes, in_first_slots, on_host


class SetMaker:
  """Places tasks in slots, and compiles programs for them."""

  def __init__(
    self, backbone: Backbone, programs: FixedShapes, shapes: PredictorConfig
  ) -> None:
    self.counter = CompilationCounter()
    self._backbone, self._programs, self._shapes = backbone, programs, shapes

  def first(self, tasks: Sequence[Task]) -> TaskSet:
    """Make the first set of tasks; slots have at least the configured sizes."""
    for task in tasks:
      require_backbone(task.spec, self._backbone.id)
    shapes = self._shapes
    by_slot = task_set.fitting(in_first_slots(map(_held, tasks)))
    sizes = SlotSizes.at_least(
      slots=shapes.slots,
      cells=shapes.cells,
      classes=shapes.classes,
      parents=shapes.parents,
      parts=shapes.parts,
    ).holding(by_slot)
    program = place_tasks(self._backbone, by_slot, sizes)
    return TaskSet(1, by_slot, sizes, program, self._preprocessing(tasks))

  def compiled(self, task_set: TaskSet) -> tuple[int, ...]:
    """Return the batch sizes that are compiled for a set, ascending."""
    return self._programs.compiled(task_set.program)

  def compile(self, task_set: TaskSet, size: int) -> int:
    """Compile all programs for a batch size; return their number."""
    with counted() as tally:
      self._compile(task_set.program, size)
    return tally.count

  def made_ready(
    self, old: TaskSet, by_slot: Mapping[int, Task]
  ) -> tuple[TaskSet, Change]:
    """Make a set; compile the batch sizes that are compiled for the old set."""
    sizes = old.sizes.holding(by_slot)
    with self.counter.counting() as tally:
      program = place_tasks(self._backbone, by_slot, sizes)
      grew = program.shapes != old.program.shapes or not (
        program.composes and old.program.composes
      )
      for size in self._programs.compiled(old.program):
        if size not in self._programs.compiled(program):
          self._compile(program, size)
      jax.block_until_ready(program)  # else requests would wait for arrays
    preprocessing = self._preprocessing(by_slot.values())
    version = old.version + 1
    ready = TaskSet(version, by_slot, sizes, program, preprocessing)
    return ready, Change(version, ready.names, ready.digest, grew, tally.count)

  def loaded(self, task: str | Path | Task) -> Task:
    if not isinstance(task, Task):
      if not isinstance(task, str | Path):
        raise TaskError(
          f"the task is of type {type(task).__name__}, expected a Task or the "
          "path of a task."
        )
      path = find.one_task(task)
      described = manifest.read(path)
      self._require_image_size(described.spec)
      task = store.load_described(path, described, self._backbone)
    self._require_image_size(task.spec)
    require_backbone(task.spec, self._backbone.id)
    return _held(task)

  def _compile(self, program: Program, size: int) -> None:
    self._programs.compile(program, size, features=self._shapes.features)

  def _require_image_size(self, spec: TaskSpec) -> None:
    own_id, wanted = self._backbone.id, spec.backbone
    if dataclasses.replace(wanted, image_size=own_id.image_size) != own_id:
      return  # another backbone: `require_backbone` refuses the task
    if wanted.image_size != own_id.image_size:
      raise TaskError(
        f"task {spec.name!r} was trained at {wanted.image_size} pixels, but "
        f"this predictor runs the backbone at {own_id.image_size} pixels: "
        "build a new predictor with this task, or with PredictorConfig(..., "
        f"image_size={wanted.image_size})."
      )

  def _preprocessing(self, tasks: Iterable[Task]) -> EvalPreprocessing:
    """Return the preprocessing of the tasks; without tasks, of the backbone."""
    for task in tasks:  # all tasks have the same preprocessing
      return task.spec.preprocessing
    side = self._backbone.config.image_size
    return self._backbone.preprocessing or EvalPreprocessing(image_size=side)


def _held(task: Task) -> Task:
  """Return a copy of the task whose parameters are in host memory."""
  return dataclasses.replace(task, params=on_host(task.params))

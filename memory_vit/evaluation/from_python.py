"""Evaluation of tasks by one call, on data that Python has."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from memory_vit.data import in_memory
from memory_vit.data.reader import Reader
from memory_vit.errors import TaskError
from memory_vit.evaluation.evaluate import evaluate_source, predict_fn
from memory_vit.evaluation.task_data import require_classes
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task, require_backbone
from memory_vit.runtime import progress_bar, sharding
from memory_vit.tasks.compose import TasksLike, require_one_pass, task_tuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskMetrics:
  """How good a task is on a split.

  Attributes:
    accuracy: in [0, 1].
    top5: share of images whose class is among the five of the highest logits.
    loss: mean cross-entropy.
    per_class: accuracy of every class; None for a class without images.
    examples: number of images.
    not_finite: number of images with a logit that is not finite; they count as
      mistakes.
  """

  accuracy: float
  top5: float
  loss: float
  per_class: tuple[float | None, ...] = dataclasses.field(repr=False)
  examples: int
  not_finite: int


def evaluate_tasks(
  backbone: Backbone,
  tasks: TasksLike,
  data: Any,
  *,
  keys: tuple[str, str] = ("image", "label"),
  batch_size: int = 128,
  progress: bool = True,
) -> dict[str, TaskMetrics]:
  """Evaluate tasks, all in one pass.

  Args:
    backbone: that they were trained on.
    tasks: that share a pass, with all that they attend to; or one of any
      regime.
    data: {task name: its split}, of all tasks or of some; or one split for all
      tasks, of the same classes. A split is as `train_task` takes it. One that
      several tasks share is read once.
    keys: of the image and the label, where examples are dictionaries.
    batch_size: images in a batch.
    progress: whether progress is shown.

  Returns:
    {task name: its metrics}, of those that have data, in the order of the
    tasks.

  Raises:
    MemoryVitError: for tasks that share no pass, other classes than a task has,
      and data that cannot be read.
  """
  tasks = task_tuple(tasks)
  by_name = {task.name: task for task in tasks}
  for task in tasks:
    require_backbone(task.spec, backbone.id)
  require_one_pass(tasks)
  mesh = sharding.make_mesh()
  sharding.require_divisible(batch_size, mesh, "batch_size")
  if not (isinstance(data, Mapping) and data.keys() & by_name.keys()):
    data = dict.fromkeys(by_name, data)
  for name in data:
    if name not in by_name:
      raise TaskError(f"data of {name!r}: the tasks are {list(by_name)}.")
  with progress_bar.shown(progress):
    # All data first: what cannot be read must not cost an evaluation.
    readers: dict[int, Reader] = {}
    names: dict[int, list[str]] = {}
    for name, split in data.items():
      key = id(split)
      if key not in readers:
        readers[key] = _open(split, by_name[name], keys)
      if by_name[name].spec.class_names:
        require_classes(by_name[name], readers[key])
      names.setdefault(key, []).append(name)
    params = sharding.put_backbone(backbone.params, mesh)
    placed = dataclasses.replace(backbone, params=params)
    found: dict[str, dict[str, Any]] = {}
    for key, reader in readers.items():
      predict = predict_fn(placed, tasks, mesh, outputs=names[key])
      found |= evaluate_source(
        predict,
        reader,
        tasks[0].spec.evaluation,
        batch_size=batch_size,
        mesh=mesh,
      )
  return {name: _metrics(found[name]) for name in by_name if name in found}


def _open(data: Any, task: Task, keys: tuple[str, str]) -> Reader:
  """The data of a task, whose labels are its classes."""
  spec = task.spec
  names = spec.class_names or tuple(map(str, range(spec.num_classes)))
  return Reader(
    in_memory.open_data(
      data, name=task.name, split="data", class_names=names, keys=keys
    )
  )


def _metrics(found: Mapping[str, Any]) -> TaskMetrics:
  return TaskMetrics(
    accuracy=found["top1"],
    top5=found["top5"],
    loss=found["loss"],
    per_class=tuple(found["per_class"]),
    examples=found["examples"],
    not_finite=found["not_finite"],
  )

"""Task masks: who attends to whom (Table 1 of the paper)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from memory_vit.errors import TaskError
from memory_vit.model.task import Task, TaskSpec
from memory_vit.model.trees import AnyArray
from memory_vit.runtime import messages


def attention_graph(
  specs: Sequence[TaskSpec], directories: Mapping[str, str] | None = None
) -> Bool[np.ndarray, "t t"]:
  """Return (t, t): whether task i attends to task j (Table 1, lower right)."""
  names = [spec.name for spec in specs]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise TaskError(f"several tasks have the same name: {twice}.")
  sees = np.eye(len(names), dtype=bool)
  for i, spec in enumerate(specs):
    for parent in spec.attends_to:
      if parent not in names or parent == spec.name:
        directory = (directories or {}).get(parent)
        raise TaskError(
          f"task {spec.name!r} attends to {parent!r}, which is not among the "
          f"other tasks {[n for n in names if n != spec.name]}: add that "
          "task. In a command, give one more --task=DIR"
          + (f"; when {spec.name!r} was trained, DIR was " if directory else "")
          + (f"{messages.brief(directory)}." if directory else ".")
        )
      j = names.index(parent)
      if not (spec.learned.has_token and specs[j].learned.has_token):
        raise TaskError(
          f"task {spec.name!r} ({spec.regime}) attends to {parent!r} "
          f"({specs[j].regime}), expected both to have a class token of "
          "their own, as in the regimes 'memory_masked' and 'cls_masked'."
        )
      sees[i, j] = True
  _refuse_circles(names, sees)
  return sees


def parent_directories(tasks: Sequence[Task]) -> dict[str, str]:
  """Return {parent: path in the provenance}. Show paths; never open them."""
  directories: dict[str, str] = {}
  for task in tasks:
    config = task.provenance.get("config")
    options = config.get("task") if isinstance(config, Mapping) else None
    paths = options.get("attends_to") if isinstance(options, Mapping) else None
    if isinstance(paths, list | tuple) and len(paths) == len(
      task.spec.attends_to
    ):
      pairs = zip(task.spec.attends_to, paths, strict=True)
      directories |= {n: path for n, path in pairs if isinstance(path, str)}
  return directories


def _refuse_circles(
  names: Sequence[str], sees: Bool[np.ndarray, "t t"]
) -> None:
  """Raise `TaskError` if tasks attend to each other in a cycle."""
  left = list(range(len(names)))
  while left:
    # In each round, remove the tasks that attend to no remaining task.
    free = [i for i in left if not any(sees[i, j] for j in left if j != i)]
    if not free:
      raise TaskError(
        f"attends_to has a cycle among the tasks {[names[i] for i in left]}."
      )
    left = [i for i in left if i not in free]


class TaskMask(NamedTuple):
  """Who attends to whom, as arrays for the task stream."""

  # True for the memory cells of a task, False for padding.
  cells: Bool[AnyArray, "t m"]
  # The slots of each task's parents, padded with the slot of the task itself.
  parents: Int32[AnyArray, "t p"]
  # True for real entries of `parents`, False for padding.
  is_parent: Bool[AnyArray, "t p"]
  # Whether a task's memory passes through the first LayerNorm of each block.
  memory_norm: Bool[AnyArray, " t"]


def task_mask(
  specs: Sequence[TaskSpec],
  *,
  slots: int = 0,
  cells: int = 0,
  parents: int = 0,
  places: Sequence[int] | None = None,
) -> TaskMask:
  """Return the `TaskMask` of tasks, padded to at least the given sizes."""
  graph = attention_graph(specs) & ~np.eye(len(specs), dtype=bool)
  place = np.arange(len(specs)) if places is None else np.asarray(places, int)
  slots = max(slots, int(place.max(initial=-1)) + 1)
  cells = max(cells, *(spec.cells for spec in specs), 0)
  parents = max(parents, int(graph.sum(axis=1).max(initial=0)))
  has_cell = np.zeros((slots, cells), bool)
  # Pad a task's parents with the slot of the task itself. Another slot may hold
  # NaN, and even with the weight 0, NaN would make the task's outputs NaN.
  gathered = np.tile(np.arange(slots, dtype=np.int32)[:, None], (1, parents))
  is_parent = np.zeros((slots, parents), bool)
  memory_norm = np.ones(slots, bool)
  for i, spec, attends_to in zip(place, specs, graph, strict=True):
    seen = place[attends_to]
    has_cell[i, : spec.cells] = True
    gathered[i, : len(seen)] = seen
    is_parent[i, : len(seen)] = True
    memory_norm[i] = spec.memory_norm
  return TaskMask(has_cell, gathered, is_parent, memory_norm)

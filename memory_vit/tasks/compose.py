"""Sets of tasks: concatenate, select, remove, rename.

A set is a tuple of `Task`. Tasks that were trained independently are
concatenated; a task that attends to others extends the model. A set may mix
both. No function of this module changes an array.
"""

# Annotations stay unevaluated, so that `help` shows short names of types.
from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, overload

import jax

from memory_vit.errors import TaskError
from memory_vit.model import trees
from memory_vit.model.masks import attention_graph, parent_directories
from memory_vit.model.regimes import REGIMES
from memory_vit.model.task import Task, TaskSpec, require_backbone


@jax.tree_util.register_pytree_with_keys_class
class Tasks(tuple[Task, ...]):
  """A tuple of tasks; `tasks["pets"]` is the task with the name "pets"."""

  @overload
  def __getitem__(self, key: SupportsIndex | str, /) -> Task: ...
  @overload
  def __getitem__(self, key: slice, /) -> tuple[Task, ...]: ...
  def __getitem__(self, key: Any, /) -> Any:
    if not isinstance(key, str):
      return super().__getitem__(key)
    by_name = {task.name: task for task in self}
    _require_name(key, list(by_name))
    return by_name[key]

  def tree_flatten_with_keys(self) -> tuple[Iterable[Any], None]:
    return [(jax.tree_util.SequenceKey(i), t) for i, t in enumerate(self)], None

  @classmethod
  def tree_unflatten(cls, _: None, children: Iterable[Any]) -> Tasks:
    return cls(children)


def concatenate(*parts: TasksLike) -> Tasks:
  """Combine tasks and sets of tasks into one set.

  Args:
    *parts: tasks, sequences or generators of tasks, or {name: task}.

  Returns:
    All tasks, in the order of the arguments.

  Raises:
    TaskError: if an argument is not a task, or the tasks cannot share a pass:
      equal names, a parent that is missing or has changed, circular attention,
      a regime with its own pass, or different backbones or preprocessing.
  """
  tasks = Tasks(task for part in parts for task in task_tuple(part))
  require_fit(tasks)
  return tasks


def select(tasks: TasksLike, names: str | Iterable[str]) -> Tasks:
  """Return the tasks of these names, in the order of the names.

  Args:
    tasks: a sequence or generator of tasks, or {name: task}.
    names: one name, or several.

  Raises:
    TaskError: if `tasks` are not tasks, a name is unknown, or a selected task
      attends to a task that is not selected.
  """
  by_name = {task.name: task for task in task_tuple(tasks)}
  if isinstance(names, str):
    names = [names]
  elif not isinstance(names, Iterable):
    raise TaskError(
      f"the argument 'names' is of type {type(names).__name__}, expected the "
      "name of a task (str), or a list of names."
    )
  names = list(names)
  for name in names:
    _require_name(name, by_name)
  return concatenate([by_name[name] for name in names])


def with_parents(tasks: Sequence[Task], name: str) -> Tasks:
  """Return a task and all tasks that it attends to, directly or indirectly."""
  by_name = {task.spec.name: task for task in tasks}
  wanted = [name]
  for current in wanted:  # the loop extends `wanted`
    _require_name(current, list(by_name))
    parents = by_name[current].spec.attends_to
    wanted += [parent for parent in parents if parent not in wanted]
  return Tasks(by_name[name] for name in wanted)


def remove(tasks: TasksLike, *names: str) -> Tasks:
  """Return all tasks except the named ones.

  Args:
    tasks: a sequence or generator of tasks, or {name: task}.
    *names: names of the tasks to remove.

  Raises:
    TaskError: if `tasks` are not tasks, a name is unknown, or a remaining task
      attends to a removed task.
  """
  tasks = task_tuple(tasks)
  for name in names:
    _require_name(name, [task.spec.name for task in tasks])
  left = [task for task in tasks if task.spec.name not in names]
  for name in names:
    readers = [t.spec.name for t in left if name in t.spec.attends_to]
    if readers:
      raise TaskError(
        f"task {name!r} cannot be removed: {readers} attend to it. Remove "
        "these tasks as well."
      )
  return Tasks(left)


def rename(
  tasks: TasksLike, old: str | Mapping[str, str], new: str = ""
) -> Tasks:
  """Rename tasks, also in the specs of the tasks that attend to them.

  Args:
    tasks: a task, a sequence or generator of tasks, or {name: task}.
    old: the present name; or {old: new} for several tasks.
    new: the new name: at most 64 lower case letters, digits, "-" and "_".

  Raises:
    TaskError: if `tasks` are not tasks, an old name is unknown, or a new name
      is taken or invalid.
  """
  tasks = task_tuple(tasks)
  names = {old: new} if isinstance(old, str) else old
  for name in names:
    _require_name(name, [task.spec.name for task in tasks])

  def renamed(task: Task) -> Task:
    spec = dataclasses.replace(
      task.spec,
      name=names.get(task.name, task.name),
      attends_to=tuple(names.get(p, p) for p in task.spec.attends_to),
    )
    return dataclasses.replace(task, spec=spec)

  return concatenate([renamed(task) for task in tasks])


def _require_name(name: str, names: Collection[str]) -> None:
  if name not in names:
    raise TaskError(f"there is no task {name!r} among {list(names)}.")


# Types in which functions accept tasks; a mapping has the form {name: task}.
TasksLike = Task | Iterable[Task] | Mapping[str, Task]


def task_tuple(tasks: TasksLike) -> tuple[Task, ...]:
  """Convert `TasksLike` to a tuple; raise `TaskError` for anything else."""
  if isinstance(tasks, Task):
    return (tasks,)
  if isinstance(tasks, str | bytes) or not isinstance(tasks, Iterable):
    raise TaskError(
      f"tasks are of type {type(tasks).__name__}, expected a Task, a sequence "
      "or generator of them, or a dictionary {name: Task}."
    )
  members = tuple(tasks.values() if isinstance(tasks, Mapping) else tasks)
  for i, task in enumerate(members):
    if not isinstance(task, Task):
      raise TaskError(
        f"entry {i} of the tasks is of type {type(task).__name__}, expected "
        "a Task, from load_task or init_task."
      )
  if isinstance(tasks, Mapping):
    for key, task in tasks.items():
      if key != task.name:
        raise TaskError(
          f"the dictionary of tasks has {task.name!r} under the key {key!r}: "
          "the keys must be the names of the tasks. To change a name, call "
          "mv.rename."
        )
  return members


def require_one_pass(tasks: Sequence[Task]) -> None:
  """Raise `TaskError` unless a single pass can run all tasks."""
  if len(tasks) != 1 or tasks[0].spec.learned.composes:
    require_fit(tasks)


def require_fit(tasks: Sequence[Task]) -> None:
  """Raise `TaskError` unless tasks can share a forward pass."""
  specs = [task.spec for task in tasks]
  require_specs_fit(specs)
  attention_graph(specs, parent_directories(tasks))
  by_name = {task.spec.name: task for task in tasks}
  for spec in (task.spec for task in tasks):
    for name, digest in zip(spec.attends_to, spec.parent_digests, strict=False):
      # Skip parents of unknown digest, and parents whose values JAX traces.
      if not digest or trees.is_traced(by_name[name].params):
        continue
      if digest != by_name[name].digest:
        raise TaskError(
          f"task {spec.name!r} was trained with another version of task "
          f"{name!r}: that version has digest {digest[:16]}, but the given "
          f"version has digest {by_name[name].digest[:16]}. Give the version "
          "that was used in training."
        )


def require_specs_fit(specs: Sequence[TaskSpec]) -> None:
  """Raise `TaskError` if regimes, backbones or preprocessing do not fit."""
  for spec in specs:
    learned = spec.learned
    if not learned.composes:
      does = "changes what the backbone computes"
      if learned.on_features:
        does = "reads all layers of the backbone, and not its pooled output"
      raise TaskError(
        f"task {spec.name!r} has the regime {spec.regime!r}, which {does}: it "
        "cannot share a pass. Give it alone to mv.Predictor, predict, "
        "evaluate, serve or export: they run it in a pass of its own. To "
        "load it in Python, call mv.load_task. Regimes whose tasks can share a "
        "pass: "
        f"{', '.join(n for n, r in REGIMES.items() if r.composes)}."
      )
  for spec in specs[1:]:
    require_backbone(spec, specs[0].backbone, specs[0].name)
  require_same_images(specs)


def require_same_images(specs: Sequence[TaskSpec]) -> None:
  """Raise `TaskError` if tasks need different preprocessing of images."""
  for spec in specs[1:]:
    if spec.preprocessing != specs[0].preprocessing:
      raise TaskError(
        f"tasks {specs[0].name!r} and {spec.name!r} need images prepared "
        f"differently: {specs[0].preprocessing} and {spec.preprocessing}. "
        "Tasks that run together share the images. Train both with the same "
        "config.data.eval_crop and config.data.resize; or make one task anew, "
        "with mv.init_task(..., preprocessing=OTHER_TASK.spec.preprocessing)."
      )

"""Sets of tasks: put together, taken apart, stored.

A set is a tuple of `Task`. Tasks that were trained apart are concatenated,
those that attend to others bring model extension, and both mix freely: who
reads whom is in the tasks. Nothing here changes an array.
"""

# As text, `help` shows the types by their short names.
from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from memory_vit import adapters
from memory_vit import paths as typed
from memory_vit.backbone import Backbone
from memory_vit.errors import TaskError
from memory_vit.escaping import escaped
from memory_vit.tasks import Task, TasksLike, require_fit, task_tuple

Tasks = tuple[Task, ...]


def concatenate(*parts: TasksLike) -> Tasks:
  """Puts tasks and sets of tasks together.

  Args:
    *parts: tasks, sequences or generators of tasks, or {name: task}.

  Returns:
    All tasks, in the order given.

  Raises:
    TaskError: for what are no tasks, and where they cannot share a pass: for
      equal names, a task that attends to one that is not there or is another, a
      circle, another backbone, image size or evaluation preprocessing.
  """
  tasks = tuple(task for part in parts for task in task_tuple(part))
  require_fit(tasks)
  return tasks


def select(tasks: TasksLike, names: str | Iterable[str]) -> Tasks:
  """The tasks of these names, in the order of the names.

  Args:
    tasks: a sequence or generator of tasks, or {name: task}.
    names: one, or several.

  Raises:
    TaskError: for what are no tasks, a name that is not there, or where one of
      them attends to a task that is not among them.
  """
  by_name = {task.name: task for task in task_tuple(tasks)}
  if isinstance(names, str):
    names = [names]
  elif not isinstance(names, Iterable):
    raise TaskError(
      f"names are of type {type(names).__name__}, expected names of tasks."
    )
  names = list(names)
  for name in names:
    _require_name(name, by_name)
  return concatenate([by_name[name] for name in names])


def with_parents(tasks: Sequence[Task], name: str) -> Tasks:
  """A task with all that it attends to, and that those attend to."""
  by_name = {task.spec.name: task for task in tasks}
  wanted = [name]
  for found in wanted:  # it grows while it is read
    _require_name(found, list(by_name))
    parents = by_name[found].spec.attends_to
    wanted += [parent for parent in parents if parent not in wanted]
  return select(tasks, wanted)


def remove(tasks: TasksLike, *names: str) -> Tasks:
  """All tasks but these.

  Args:
    tasks: a sequence or generator of tasks, or {name: task}.
    *names: of those that go.

  Raises:
    TaskError: for what are no tasks, a name that is not there, or one that a
      task that stays attends to.
  """
  tasks = task_tuple(tasks)
  for name in names:
    _require_name(name, [task.spec.name for task in tasks])
  left = [task for task in tasks if task.spec.name not in names]
  for name in names:
    readers = [t.spec.name for t in left if name in t.spec.attends_to]
    if readers:
      raise TaskError(
        f"task {name!r} cannot be removed: {readers} attend to it. Remove them "
        "as well."
      )
  return tuple(left)


def rename(tasks: TasksLike, old: str, new: str) -> Tasks:
  """Gives a task another name, also where others attend to it.

  Args:
    tasks: a task, a sequence or generator of tasks, or {name: task}.
    old: its name.
    new: lower case letters, digits, "-" and "_"; at most 64.

  Raises:
    TaskError: for what are no tasks, a name that is not there, is taken, or is
      no name.
  """
  tasks = task_tuple(tasks)
  _require_name(old, [task.spec.name for task in tasks])

  def renamed(task: Task) -> Task:
    spec = dataclasses.replace(
      task.spec,
      name=new if task.spec.name == old else task.spec.name,
      attends_to=tuple(
        new if parent == old else parent for parent in task.spec.attends_to
      ),
    )
    return dataclasses.replace(task, spec=spec)

  return concatenate([renamed(task) for task in tasks])


def save_tasks(tasks: TasksLike, path: str | os.PathLike) -> None:
  """Writes each task to `path`/NAME.

  Args:
    tasks: a task, a sequence or generator of tasks, or {name: task}.
    path: of a directory that holds nothing else.

  Raises:
    TaskError: where tasks do not fit together, something else has a name, or
      other tasks lie in the directory: it would hold another set.
  """
  tasks = concatenate(tasks)
  names = [task.spec.name for task in tasks]
  found = [file.parent.name for file in Path(path).glob("*/task.json")]
  others = sorted(n for n in found if n not in names and n[0] != ".")
  if others:
    raise TaskError(
      f"{path} holds other tasks, {others}: remove them, or give another "
      "directory. Nothing was written."
    )
  for name in names:
    _require_no_link(Path(path) / name)
  for task in tasks:
    adapters.save_task(task, Path(path) / task.spec.name)


def load_tasks(
  paths: str | os.PathLike | Sequence[str | os.PathLike], backbone: Backbone
) -> Tasks:
  """Reads tasks that share a pass.

  Args:
    paths: directories of tasks, and directories that hold some, such as
      WORKDIR/tasks.
    backbone: on which they will run.

  Raises:
    TaskError: where one cannot be read, or they do not fit together.
  """
  if isinstance(paths, str | os.PathLike):
    paths = [paths]
  directories = [found for path in paths for found in task_directories(path)]
  return concatenate(
    [adapters.load_task(found, backbone) for found in directories]
  )


def task_directories(path: str | os.PathLike) -> list[Path]:
  """The path itself where it is a task, or the tasks in it, by name.

  Raises:
    TaskError: where there is none.
  """
  path = typed.local(path, "a task", TaskError)
  if (path / "task.json").is_file():
    return [path]
  found = sorted(file.parent for file in path.glob("*/task.json"))
  # A task that is being written has a directory with a dot.
  found = [directory for directory in found if directory.name[0] != "."]
  if not found:
    raise TaskError(
      f"{path} is neither a task nor a directory of tasks: there is no "
      "task.json in it, nor one level below."
    )
  for directory in found:
    _require_plain_name(directory)
    _require_no_link(directory)
  return found


def _require_plain_name(directory: Path) -> None:
  """What lies in a directory that is given is named in lines of ours."""
  shown = escaped(directory.name)
  if shown != directory.name:
    raise TaskError(
      f"{directory.parent} has a task in {shown}, whose name has control "
      "characters, or is no UTF-8: rename it."
    )


def _require_no_link(directory: Path) -> None:
  """A directory that is given may be a link; what lies in it may not."""
  if directory.is_symlink():
    raise TaskError(
      f"{directory} is a link, which may lead anywhere: give the directory "
      "that it points to."
    )


def _require_name(name: str, names: Sequence[str]) -> None:
  if name not in names:
    raise TaskError(f"there is no task {name!r} among {list(names)}.")

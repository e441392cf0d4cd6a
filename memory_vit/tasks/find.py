"""Find saved tasks: at paths, and the parents without which they cannot run."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memory_vit.errors import TaskError
from memory_vit.runtime import hub
from memory_vit.runtime import paths as typed
from memory_vit.runtime.messages import escaped, name_list
from memory_vit.tasks import array_files, hub_tasks, manifest
from memory_vit.tasks.manifest import Manifest


def find_tasks(
  paths: Iterable[str | os.PathLike[str]],
) -> list[tuple[Path, Manifest]]:
  """All tasks at some paths; of one that lies at two places, the first."""
  found: list[tuple[Path, Manifest]] = []
  places: dict[Any, Path] = {}
  for one in itertools.chain.from_iterable(map(task_paths, paths)):
    read = manifest.read(one)
    key = read.spec, frozenset(read.arrays.items())
    # One path twice stays twice: a mistake, which is refused later.
    if places.setdefault(key, one.resolve()) == one.resolve():
      found.append((one, read))
  return found


def task_paths(path: str | os.PathLike[str]) -> list[Path]:
  """The path itself if it is a task, or the tasks in it, sorted by name.

  Of an address of the hub, those that were fetched.
  """
  if hub.is_address(path):
    return hub_tasks.fetch(str(path))
  path = typed.place(path, "a task", TaskError)
  if array_files.is_single_file(path) or (path / "task.json").is_file():
    return [path]
  found = paths_in(path)
  if not found:
    run = path / "tasks"
    hint = f" The tasks of a run are in {run}." if run.is_dir() else ""
    raise TaskError(
      f"{escaped(str(path))} is neither a task nor a directory of tasks: there "
      "is no task.json in it, nor one level below, and no .safetensors file."
      f"{hint}"
    )
  for directory in found:
    _require_plain_name(directory)
    require_no_link(directory)
  return found


def one_task(path: str | os.PathLike[str]) -> Path:
  """A task, or the only one in a directory or a repository of the hub."""
  if hub.is_address(path):
    files = hub_tasks.fetch(str(path))
  else:
    path = typed.as_path(path).absolute()
    if array_files.is_single_file(path) or (path / manifest.FILE).is_file():
      return path
    files = paths_in(path)
    if not files:
      return path
  if len(files) > 1:
    names = name_list([escaped(file.stem) for file in files])
    raise TaskError(
      f"{path} has {len(files)} tasks: {names}. mv.load_tasks reads several; "
      "else give one of them (of the hub, as hf://OWNER/NAME/TASK)."
    )
  if not hub.is_address(path):  # the cache of the hub consists of links
    require_no_link(files[0])
  return files[0]


def paths_in(path: Path) -> list[Path]:
  """Paths in a directory that look like tasks, sorted."""
  directories = (file.parent for file in path.glob("*/task.json"))
  # A task that is being written has a name that begins with a dot.
  found = sorted([*directories, *task_files(path)])
  return [path for path in found if path.name[0] != "."]


def task_files(path: Path) -> Iterator[Path]:
  """Files in a directory that look like tasks: not the arrays of one."""
  is_task = (path / manifest.FILE).exists()
  return (
    file
    for file in path.glob(f"*{array_files.SUFFIX}")
    if not (is_task and file.name == array_files.FILE)
  )


def _require_plain_name(directory: Path) -> None:
  """Refuse names that would break the line of a message."""
  shown = escaped(directory.name)
  if shown != directory.name:
    raise TaskError(
      f"{directory.parent} has a task in {shown}, whose name has control "
      "characters, or is no UTF-8: rename it."
    )


def require_no_link(directory: Path) -> None:
  """Refuse links in a directory, which itself may be one."""
  if directory.is_symlink():
    raise TaskError(
      f"{directory} is a link, which may lead anywhere: give the directory "
      "that it points to."
    )


def ancestor_directories(
  directories: Sequence[Path], indirect: Sequence[Path] = ()
) -> list[Path]:
  """`indirect`, and all that tasks attend to, found beside them."""
  # A parent is known by its name: among these, or beside a task, where a run
  # exports it as well. Directories that a task names are never followed.
  known = {_name(path): path for path in (*directories, *indirect)}
  waiting = list(known.values())
  found = list(indirect)
  while waiting:
    path = waiting.pop(0)
    spec = manifest.read(path).spec
    for parent in spec.attends_to:
      if parent in known:
        continue
      beside = path.absolute().parent / parent
      if not _is_task(beside, parent):
        beside = beside.with_name(parent + array_files.SUFFIX)
      if not _is_task(beside, parent):
        raise TaskError(
          f"task {spec.name!r} in {path} attends to {parent!r}, which is not "
          f"in {beside.with_suffix('')}. Put it there, or give its directory "
          "in config.task.indirect (in config.task.attends_to, if the new task "
          "attends to it too)."
        )
      known[parent] = beside
      found.append(beside)
      waiting.append(beside)
  return found


def _name(path: Path) -> str:
  return manifest.read(path).spec.name


def _is_task(path: Path, name: str) -> bool:
  """Whether a task of this name lies there; a link may lead anywhere."""
  file = path if array_files.is_single_file(path) else path / manifest.FILE
  if path.is_symlink() or not file.is_file():
    return False
  return _name(path) == name

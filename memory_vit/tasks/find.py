"""Find saved tasks at paths, and the parent tasks that they need to run."""

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
  """Return all tasks at these paths, but only the first of identical copies."""
  tasks: list[tuple[Path, Manifest]] = []
  places: dict[Any, Path] = {}
  for path in itertools.chain.from_iterable(map(task_paths, paths)):
    described = manifest.read(path)
    key = described.spec, frozenset(described.arrays.items())
    # Leave out a copy of an earlier task. However, if the same path is given
    # twice, return its task twice, so that the caller raises an error.
    if places.setdefault(key, path.resolve()) == path.resolve():
      tasks.append((path, described))
  return tasks


def task_paths(path: str | os.PathLike[str]) -> list[Path]:
  """Return the path if it is a task, else the sorted paths of tasks inside.

  If the path is an address of the Hugging Face hub, fetch its tasks.
  """
  if hub.is_address(path):
    return hub_tasks.fetch(str(path))
  path = typed.place(path, "a task", TaskError)
  if array_files.is_single_file(path) or (path / "task.json").is_file():
    return [path]
  directories = paths_in(path)
  if not directories:
    run = path / "tasks"
    hint = f" The tasks of a run are in {run}." if run.is_dir() else ""
    raise TaskError(
      f"{escaped(str(path))} is neither a task nor a directory of tasks: there "
      "is no task.json in it or one level below, and no .safetensors file."
      f"{hint}"
    )
  for directory in directories:
    _require_plain_name(directory)
    require_no_link(directory)
  return directories


def one_task(path: str | os.PathLike[str]) -> Path:
  """Return the path if it is a task, else the path of the only task in it."""
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
      f"{path} has {len(files)} tasks: {names}. Give the path of one task (on "
      "the hub: hf://OWNER/NAME/TASK), or read all tasks with mv.load_tasks."
    )
  if not hub.is_address(path):  # in the cache of the hub, all files are links
    require_no_link(files[0])
  return files[0]


def paths_in(path: Path) -> list[Path]:
  """Return the paths in a directory that look like tasks, sorted."""
  directories = (file.parent for file in path.glob("*/task.json"))
  # Leave out tasks that are being written: their names begin with a dot.
  candidates = sorted([*directories, *task_files(path)])
  return [path for path in candidates if path.name[0] != "."]


def task_files(path: Path) -> Iterator[Path]:
  """Return files in a directory that look like single-file tasks."""
  # If `path` is a task itself, leave out its file of arrays, which has the same
  # suffix as a single-file task.
  is_task = (path / manifest.FILE).exists()
  return (
    file
    for file in path.glob(f"*{array_files.SUFFIX}")
    if not (is_task and file.name == array_files.FILE)
  )


def _require_plain_name(directory: Path) -> None:
  """Raise `TaskError` if the name of a directory cannot be printed safely."""
  shown = escaped(directory.name)
  if shown != directory.name:
    raise TaskError(
      f"the file name {shown} in {directory.parent} has control "
      "characters, or is not UTF-8: rename it."
    )


def require_no_link(directory: Path) -> None:
  """Raise `TaskError` if a path is a link; links above the path are allowed."""
  if directory.is_symlink():
    raise TaskError(
      f"{directory} is a link, which may lead anywhere: give the path that it "
      "points to."
    )


def ancestor_directories(
  directories: Sequence[Path], indirect: Sequence[Path] = ()
) -> list[Path]:
  """Return `indirect`, then the paths of ancestors that are in no argument."""
  # A parent is a task that another task attends to. Search for it by its name:
  # first among the given directories, then beside the task that attends to it,
  # because a run exports a task and its parents into one directory. Paths in a
  # task's file are not used, because the file is untrusted.
  known = {_name(path): path for path in (*directories, *indirect)}
  waiting = list(known.values())
  ancestors = list(indirect)
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
          f"in {beside.with_suffix('')}. Put the missing task into this "
          "directory, or give its path in config.task.indirect (or in "
          "config.task.attends_to, if the new task also attends to it)."
        )
      known[parent] = beside
      ancestors.append(beside)
      waiting.append(beside)
  return ancestors


def _name(path: Path) -> str:
  return manifest.read(path).spec.name


def _is_task(path: Path, name: str) -> bool:
  """Return whether `path` is a task with this name, and not a link."""
  file = path if array_files.is_single_file(path) else path / manifest.FILE
  if path.is_symlink() or not file.is_file():
    return False
  return _name(path) == name

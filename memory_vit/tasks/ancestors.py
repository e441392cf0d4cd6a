"""Parents of parents: the tasks without which an extension cannot run."""

from collections.abc import Sequence
from pathlib import Path

from memory_vit.errors import TaskError
from memory_vit.tasks import manifest, single_file


def ancestor_directories(
  directories: Sequence[Path], indirect: Sequence[Path] = ()
) -> list[Path]:
  """Find all tasks that some tasks attend to, directly or through others.

  A parent is known by its name. It is looked for among all directories that
  are named here, then beside the task that attends to it, where a run exports
  it as well. What a task says of other directories is never followed.

  Args:
    directories: of the tasks.
    indirect: of further tasks, in which to look first.

  Returns:
    `indirect`, and then what was found beside the tasks.

  Raises:
    TaskError: for what is no task, and for a parent that is in neither place.
  """
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
        beside = beside.with_name(parent + single_file.SUFFIX)
      if not _is_task(beside, parent):
        raise TaskError(
          f"task {spec.name!r} in {path} attends to {parent!r}, which is not "
          f"in {beside.with_suffix('')}. Put it there, or give its directory "
          "in config.task.indirect (in config.task.attends_to, if the new task "
          "is to read it too)."
        )
      known[parent] = beside
      found.append(beside)
      waiting.append(beside)
  return found


def _name(path: Path) -> str:
  return manifest.read(path).spec.name


def _is_task(path: Path, name: str) -> bool:
  """Whether a task of this name lies there; a link may lead anywhere."""
  file = path if single_file.is_one(path) else path / manifest.FILE
  if path.is_symlink() or not file.is_file():
    return False
  return _name(path) == name

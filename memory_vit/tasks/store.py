"""Save and load tasks.

A saved task is a directory, and nothing else is in it:

  task.json            what it is, readable: see `manifest`
  arrays.safetensors   the parameters: see `array_files`

or one file, NAME.safetensors, with both: see `single_file`.
"""

# As text, `help` shows jax.Array by its name.
from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memory_vit.errors import TaskError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, backbone_shapes, trunk
from memory_vit.model.task import Task, TaskSpec, require_backbone
from memory_vit.runtime import paths as typed
from memory_vit.runtime.messages import brief, escaped, listed
from memory_vit.runtime.output_directory import OutputDirectory
from memory_vit.tasks import array_files, manifest, single_file
from memory_vit.tasks.compose import Tasks, TasksLike, concatenate
from memory_vit.tasks.manifest import Manifest

_ARRAYS = "arrays.safetensors"


def _written(path: Path) -> Collection[str]:
  """The files of a task, if it is one."""
  is_task = (path / manifest.FILE).is_file()
  return (manifest.FILE, _ARRAYS) if is_task else ()


_DIRECTORY = OutputDirectory("the path", _written, TaskError)


def save_task(
  task: Task, path: str | os.PathLike[str], *, format: str | None = None
) -> None:
  """Write a task; an older one at this path is replaced as a whole.

  Args:
    task: with values that are known and finite.
    path: of the directory; or of the file, which ends in .safetensors.
    format: "directory" (task.json and arrays.safetensors) or
      "safetensors" (all in one file); by default as the path ends.

  Raises:
    TaskError: for what is no task, where the path is there and is not a task,
      or the task could not be loaded again. Nothing is written then.
    TrainingError: if it cannot be written.
  """
  if not isinstance(task, Task):
    raise TaskError(
      f"save_task got a {type(task).__name__}, expected one Task (save_tasks "
      "writes several)."
    )
  path = Path(path).absolute()
  if format is None:
    is_file = path.suffix == single_file.SUFFIX
    format = "safetensors" if is_file else "directory"
  _require_place(path, format)
  flat = {k: np.asarray(v) for k, v in trees.flatten(task.params).items()}
  array_files.require_finite(flat, f"task {task.spec.name!r} cannot be saved")
  described = Manifest(
    spec=task.spec,
    arrays={name: array_files.describe(array) for name, array in flat.items()},
    provenance=task.provenance,
  )
  if format == "safetensors":
    single_file.write(path, flat, manifest.to_text(described, str(path)))
    return
  text = manifest.to_text(described, str(path / manifest.FILE))
  with _DIRECTORY.replacing(path) as new:
    (new / _ARRAYS).write_bytes(array_files.to_bytes(flat))
    (new / manifest.FILE).write_text(text, encoding="utf-8")


def _require_place(path: Path, format: str) -> None:
  """Refuse a path at which something else lies, or would be misread."""
  if format not in ("directory", "safetensors"):
    raise TaskError(
      f"format is {brief(format)}, expected 'directory' or 'safetensors'."
    )
  is_file = format == "safetensors"
  if is_file != (path.suffix == single_file.SUFFIX):
    raise TaskError(
      f"{path} with format={format!r}: expected a name that ends in "
      f"{single_file.SUFFIX} for a file, and another one for a directory."
    )
  if not is_file:
    _DIRECTORY.require_own(path)
  elif path.exists() and not path.is_file():
    raise TaskError(f"{path} exists and is not a task: it is left as it is.")


def load_task(path: str | os.PathLike[str], backbone: Backbone) -> Task:
  """Read a task, for the backbone that it was trained on.

  Args:
    path: directory or file that `save_task` wrote; or a directory with one
      such file, as a model hub keeps it.
    backbone: on which it will run.

  Raises:
    TaskError: for what is not a task or is damaged, a format that
      is not known, or another backbone.
  """
  path = _in_repository(Path(path).absolute())
  return load_described(path, manifest.read(path), backbone)


def load_described(path: Path, found: Manifest, backbone: Backbone) -> Task:
  """Read a task of which `find_tasks` has read what it is; see `load_task`."""
  require_backbone(found.spec, backbone.id)
  # What fits task.json fits the backbone that it names, unless that is a lie.
  shapes = trees.flatten(_shapes(backbone, found.spec))
  problems = trees.differences(shapes, found.arrays)
  if problems:
    raise TaskError(f"task in {path} does not fit: {listed(problems)}.")
  flat = read_arrays(path, found)
  params = jax.device_put(trees.unflatten(flat))
  return Task(found.spec, params, found.provenance)


def _in_repository(path: Path) -> Path:
  """The one .safetensors file in a directory that is no task itself."""
  if single_file.is_one(path) or (path / manifest.FILE).is_file():
    return path
  found = sorted(_task_files(path))
  if len(found) > 1:
    raise TaskError(
      f"{path} has {len(found)} tasks, expected one: load_tasks reads several."
    )
  if not found:
    return path
  _require_no_link(found[0])
  return found[0]


def read_arrays(path: Path, found: Manifest) -> dict[str, np.ndarray]:
  """Read and verify the arrays of the task that `save_task` wrote to `path`.

  Returns:
    {"cls": (d,), "memory": (l, m, d), "head/kernel": (d, c), "head/bias":
    (c,)}, float32; others in other regimes.

  Raises:
    TaskError: where they cannot be read, or are not what `task.json` says, or
      anything else lies in the directory.
  """
  if single_file.is_one(path):
    more = 2 * manifest.MAX_FILE_BYTES
    return array_files.read(path.resolve(), found.arrays, more)
  array_files.require_entries(path, [manifest.FILE, _ARRAYS])
  return array_files.read(path / _ARRAYS, found.arrays)


def _shapes(backbone: Backbone, spec: TaskSpec) -> dict[str, Any]:
  """The shapes of the parameters of a task on a backbone."""
  config = backbone.config
  shapes = spec.expected_shapes(
    config.width, config.depth, config.summary_tokens
  )
  if spec.learned.holds_backbone:
    shapes["backbone"] = trunk(backbone_shapes(config))
  return shapes


def save_tasks(
  tasks: TasksLike, path: str | os.PathLike[str], *, format: str = "directory"
) -> None:
  """Write each task to `path`/NAME, or to `path`/NAME.safetensors.

  Args:
    tasks: a task, a sequence or generator of tasks, or {name: task}.
    path: a directory that holds nothing else.
    format: as of `save_task`.

  Raises:
    TaskError: where tasks do not fit together, something else has a name, or
      other tasks lie in the directory: it would hold another set.
  """
  tasks = concatenate(tasks)
  suffix = single_file.SUFFIX if format == "safetensors" else ""
  names = [task.spec.name + suffix for task in tasks]
  found = [found.name for found in _paths_in(Path(path))]
  others = sorted(n for n in found if n not in names and n[0] != ".")
  if others:
    raise TaskError(
      f"{path} holds other tasks, {others}: remove them, or give another "
      "directory. Nothing was written."
    )
  for name in names:
    _require_no_link(Path(path) / name)
  for task, name in zip(tasks, names, strict=True):
    save_task(task, Path(path) / name, format=format)


def load_tasks(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  backbone: Backbone,
) -> Tasks:
  """Read tasks that share a pass.

  Args:
    paths: tasks, and directories that hold some, such as WORKDIR/tasks. A task
      that lies in two of them, as what another attends to does, is read once.
    backbone: on which they will run.

  Raises:
    TaskError: where one cannot be read, or they do not fit together.
  """
  if isinstance(paths, str | os.PathLike):
    paths = [paths]
  return concatenate(
    [load_described(*found, backbone) for found in find_tasks(paths)]
  )


def find_tasks(
  paths: Iterable[str | os.PathLike[str]],
) -> list[tuple[Path, Manifest]]:
  """All tasks at some paths; of one that lies at two places, the first.

  What is given twice is there twice: that is a mistake, and refused later.

  Raises:
    TaskError: where there is none at one of them, or one cannot be read.
  """
  found: list[tuple[Path, Manifest]] = []
  places: dict[Any, Path] = {}
  for one in itertools.chain.from_iterable(map(task_paths, paths)):
    read = manifest.read(one)
    key = read.spec, frozenset(read.arrays.items())
    if places.setdefault(key, one.resolve()) == one.resolve():
      found.append((one, read))
  return found


def task_paths(path: str | os.PathLike[str]) -> list[Path]:
  """The path itself where it is a task, or the tasks in it, sorted by name.

  Each is a directory, or a .safetensors file.

  Raises:
    TaskError: where there is none.
  """
  path = typed.local(path, "a task", TaskError)
  if single_file.is_one(path) or (path / "task.json").is_file():
    return [path]
  # A task that is being written has a name with a dot.
  found = [path for path in _paths_in(path) if path.name[0] != "."]
  if not found:
    run = path / "tasks"
    hint = f" The tasks of a run are in {run}." if run.is_dir() else ""
    raise TaskError(
      f"{path} is neither a task nor a directory of tasks: there is no "
      "task.json in it, nor one level below, and no .safetensors file."
      f"{hint}"
    )
  for directory in found:
    _require_plain_name(directory)
    _require_no_link(directory)
  return found


def _paths_in(path: Path) -> list[Path]:
  """Paths in a directory that look like tasks, sorted."""
  directories = (file.parent for file in path.glob("*/task.json"))
  return sorted([*directories, *_task_files(path)])


def _task_files(path: Path) -> Iterator[Path]:
  """Files in a directory that look like tasks: not the arrays of one."""
  is_task = (path / manifest.FILE).exists()
  return (
    file
    for file in path.glob(f"*{single_file.SUFFIX}")
    if not (is_task and file.name == _ARRAYS)
  )


def _require_plain_name(directory: Path) -> None:
  """Refuse names that would break the line of a message."""
  shown = escaped(directory.name)
  if shown != directory.name:
    raise TaskError(
      f"{directory.parent} has a task in {shown}, whose name has control "
      "characters, or is no UTF-8: rename it."
    )


def _require_no_link(directory: Path) -> None:
  """Refuse links in a directory, which itself may be one."""
  if directory.is_symlink():
    raise TaskError(
      f"{directory} is a link, which may lead anywhere: give the directory "
      "that it points to."
    )

"""Save, load and describe tasks.

A saved task is a directory with exactly two files:

  task.json            the description of the task: see `manifest`
  arrays.safetensors   the parameters: see `array_files`

or one file, NAME.safetensors, with both.
"""

# Annotations stay unevaluated, so that `help` shows short names of types.
from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memory_vit.errors import TaskError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, backbone_shapes, trunk
from memory_vit.model.task import Task, TaskSpec, require_backbone
from memory_vit.runtime import bucket
from memory_vit.runtime.messages import brief, listed
from memory_vit.runtime.output_directory import OutputDirectory
from memory_vit.runtime.paths import as_path, followed
from memory_vit.tasks import array_files, find, manifest
from memory_vit.tasks.array_files import StoredArray
from memory_vit.tasks.compose import Tasks, TasksLike, concatenate
from memory_vit.tasks.manifest import Manifest


def _written(path: Path) -> Collection[str]:
  """Return the names of the files of a task; () if `path` is not a task."""
  # A killed process may leave a task without task.json in a bucket. To let
  # `save_task` replace such a task, every path in a bucket counts as a task.
  is_task = bucket.is_in(path) or (path / manifest.FILE).is_file()
  return (manifest.FILE, array_files.FILE) if is_task else ()


_DIRECTORY = OutputDirectory("the path", _written, TaskError)


def save_task(
  task: Task, path: str | os.PathLike[str], *, format: str | None = None
) -> None:
  """Write a task; replace an older task at this path as a whole.

  Args:
    task: a task with finite values, which JAX does not trace.
    path: path of a directory, or of a file whose name ends in .safetensors;
      local, or in a bucket, gs://BUCKET/NAME.
    format: "directory" (task.json and arrays.safetensors) or "safetensors" (all
      in one file); by default the ending of the path decides.

  Raises:
    TaskError: if `task` is not a task or could not be loaded again, or `path`
      holds something else. Nothing is written in these cases.
    TrainingError: if the files cannot be written.
  """
  if not isinstance(task, Task):
    raise TaskError(
      f"save_task got a {type(task).__name__}, expected one Task (save_tasks "
      "writes several)."
    )
  path = as_path(path).absolute()
  if format is None:
    is_file = path.suffix == array_files.SUFFIX
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
    array_files.write_single_file(
      path, flat, manifest.to_text(described, str(path))
    )
    return
  text = manifest.to_text(described, str(path / manifest.FILE))
  with _DIRECTORY.replacing(path) as new:
    (new / array_files.FILE).write_bytes(array_files.to_bytes(flat))
    (new / manifest.FILE).write_text(text, encoding="utf-8")


def _require_place(path: Path, format: str) -> None:
  """Raise `TaskError` unless a task in this format may be written to `path`."""
  if format not in ("directory", "safetensors"):
    raise TaskError(
      f"format is {brief(format)}, expected 'directory' or 'safetensors'."
    )
  is_file = format == "safetensors"
  if is_file != (path.suffix == array_files.SUFFIX):
    raise TaskError(
      f"{path} does not fit format={format!r}: expected a name that ends in "
      f"{array_files.SUFFIX} for a file, and any other name for a directory."
    )
  if not is_file:
    _DIRECTORY.require_own(path)
  elif path.exists() and not path.is_file():
    raise TaskError(f"{path} is not a file: expected a file or a new path.")


def load_task(path: str | os.PathLike[str], backbone: Backbone) -> Task:
  """Read a task for the backbone that it was trained on.

  Args:
    path: directory or file that `save_task` wrote, local or in a bucket
      (gs://BUCKET/NAME); a directory with one such file; or
      `hf://OWNER/NAME[/TASK][@REVISION]` of the Hugging Face hub, in which TASK
      chooses one of several tasks.
    backbone: the backbone on which the task will run.

  Raises:
    TaskError: if there is no task, or it is damaged, of an unknown format, or
      of another backbone.
  """
  path = find.one_task(path)
  return load_described(path, manifest.read(path), backbone)


def load_described(path: Path, described: Manifest, backbone: Backbone) -> Task:
  """Load a task whose manifest has been read."""
  require_backbone(described.spec, backbone.id)
  # A forged task.json may name this backbone, but have arrays of other shapes.
  shapes = trees.flatten(_shapes(backbone, described.spec))
  problems = trees.differences(shapes, described.arrays)
  if problems:
    raise TaskError(
      f"the task in {path} does not fit the backbone: {listed(problems)}."
    )
  return read_task(path, described)


def read_task(path: Path, described: Manifest) -> Task:
  """Read a task and verify its arrays, without checking its backbone."""
  flat = read_arrays(path, described)
  params = jax.device_put(trees.unflatten(flat))
  return Task(described.spec, params, described.provenance)


def read_arrays(path: Path, described: Manifest) -> dict[str, np.ndarray]:
  """Read and verify {"head/kernel": (d, c), ...}; refuse any other files."""
  if array_files.is_single_file(path):
    more = 2 * manifest.MAX_FILE_BYTES
    return array_files.read(followed(path), described.arrays, more)
  array_files.require_entries(path, [manifest.FILE, array_files.FILE])
  return array_files.read(path / array_files.FILE, described.arrays)


def _shapes(backbone: Backbone, spec: TaskSpec) -> dict[str, Any]:
  """Return the shapes of the parameters of a task on a backbone."""
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
    path: a directory that holds no other tasks.
    format: see `save_task`.

  Raises:
    TaskError: if the tasks do not fit together, if the path of a task is taken
      by something else, or if the directory holds tasks with other names.
  """
  tasks, directory = concatenate(tasks), as_path(path)
  suffix = array_files.SUFFIX if format == "safetensors" else ""
  names = [task.spec.name + suffix for task in tasks]
  present = [entry.name for entry in find.paths_in(directory)]
  foreign = sorted(n for n in present if n not in names and n[0] != ".")
  if foreign:
    raise TaskError(
      f"{path} holds other tasks, {foreign}: remove them, or give another "
      "directory. Nothing was written."
    )
  for name in names:
    find.require_no_link(directory / name)
  for task, name in zip(tasks, names, strict=True):
    save_task(task, directory / name, format=format)


def load_tasks(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  backbone: Backbone,
) -> Tasks:
  """Read tasks that share a pass.

  Args:
    paths: paths of tasks, and of directories with tasks, such as WORKDIR/tasks
      or hf://OWNER/NAME. Of identical copies of a task, only the first is read.
    backbone: the backbone on which the tasks will run.

  Raises:
    TaskError: if a task cannot be read, or the tasks do not fit together.
  """
  if isinstance(paths, str | os.PathLike):
    paths = [paths]
  return concatenate(
    [load_described(*saved, backbone) for saved in find.find_tasks(paths)]
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReport:
  """The description of a saved task."""

  path: str
  spec: TaskSpec
  parameters: int  # number of parameters
  arrays: Mapping[str, StoredArray]
  damage: str  # what is wrong with the arrays; "" if they were verified
  provenance: Mapping[str, Any]


def inspect_task(path: str | os.PathLike[str]) -> TaskReport:
  """Describe a saved task without its backbone; report any damaged arrays."""
  path = as_path(path)
  described = manifest.read(path)
  damage = ""
  try:
    read_arrays(path, described)
  except TaskError as error:
    damage = str(error)
  return TaskReport(
    path=str(path),
    spec=described.spec,
    parameters=sum(array.size for array in described.arrays.values()),
    arrays=described.arrays,
    damage=damage,
    provenance=described.provenance,
  )

"""Tasks as objects: made, saved and loaded.

A saved task is a directory, and nothing else is in it:

  task.json   what it is, readable: see `manifest`
  arrays/     the parameters: see `array_files`
"""

# As text, `help` shows jax.Array by its name.
from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memory_vit import array_files, manifest, trees
from memory_vit.backbone import Backbone, backbone_shapes
from memory_vit.errors import TaskError
from memory_vit.keys import require_key
from memory_vit.manifest import Manifest
from memory_vit.model import TaskParams
from memory_vit.records import listed
from memory_vit.regimes import REGIMES
from memory_vit.tasks import (
  EvalPreprocessing,
  Task,
  TaskSpec,
  require_backbone,
  task_tuple,
)

# Of a backbone, what is below its head.
_TRUNK = ("Transformer", "cls", "embedding")
_ARRAYS = "arrays"
# As `tempfile.mkdtemp` ends a name.
_SCRATCH = re.compile(r"\.(?P<name>.+)-[a-z0-9_]{8}")


def init_task(
  key: jax.Array,
  backbone: Backbone,
  *,
  name: str,
  num_classes: int,
  cells: int = 5,
  regime: str = "memory_masked",
  bottleneck: int = 0,
  attends_to: str | Task | Iterable[str | Task] | Mapping[str, Task] = (),
  memory_norm: bool = True,
  memory_std: float = 0.02,
  cls_init: str = "pretrained",
  class_names: Sequence[str] = (),
  evaluation: EvalPreprocessing | None = None,
) -> Task:
  """A new task, before training.

  Args:
    key: of the random numbers, such as `jax.random.key(0)`.
    backbone: that it is for.
    name: see `TaskSpec`.
    num_classes: c.
    cells: m, memory cells per layer; 0 in a regime without memory.
    regime: how it will be learned, see `regimes`.
    bottleneck: width of adapters; 0 in a regime without.
    attends_to: the earlier tasks that it reads, one or several. Of a `Task`,
      not of a mere name, its digest is kept, and another of that name is
      refused later.
    memory_norm: see `TaskSpec`.
    memory_std: memory is drawn from N(0, memory_std^2).
    cls_init: "pretrained" starts its class token as a copy of the backbone's,
      "normal" at N(0, 0.02^2).
    class_names: c names, or none.
    evaluation: how pictures are prepared; by default resized to the square.

  Returns:
    The task, with the head at zero.

  Raises:
    TaskError: for values that are not possible.
    MemoryVitError: for a key that is none.
  """
  require_key(key)
  if cls_init not in ("pretrained", "normal"):
    raise TaskError(
      f"cls_init is {cls_init!r}, expected 'pretrained' or 'normal'."
    )
  if not (math.isfinite(memory_std) and memory_std > 0):
    raise TaskError(f"memory_std is {memory_std}, expected a positive number.")
  size = backbone.config.image_size
  parents = _parents(name, attends_to)
  spec = TaskSpec(
    name=name,
    num_classes=num_classes,
    cells=cells,
    regime=regime,
    bottleneck=bottleneck,
    attends_to=tuple(name for name, _ in parents),
    parent_digests=tuple(digest for _, digest in parents),
    memory_norm=memory_norm,
    class_names=tuple(class_names),
    backbone=backbone.id,
    evaluation=evaluation or EvalPreprocessing(image_size=size),
  )
  params = TaskParams(backbone.config, spec, memory_std).init(key)["params"]
  if "cls" in params and cls_init == "pretrained":
    params["cls"] = jnp.array(backbone.params["cls"][0, 0])
  if "backbone" in REGIMES[regime].trained:
    params["backbone"] = {part: backbone.params[part] for part in _TRUNK}
  return Task(spec, params)


def _parents(
  name: str,
  attends_to: str | Task | Iterable[str | Task] | Mapping[str, Task],
) -> list[tuple[str, str]]:
  """Name and digest of each task that `name` reads; "" where it is unknown."""
  if isinstance(attends_to, str):
    attends_to = [attends_to]
  elif isinstance(attends_to, Task | Mapping):
    attends_to = task_tuple(attends_to)
  elif not isinstance(attends_to, Iterable):
    raise TaskError(
      f"task {name!r}: attends_to is of type {type(attends_to).__name__}, "
      "expected tasks, or names of tasks."
    )
  parents = []
  for parent in attends_to:
    if not isinstance(parent, str | Task):
      raise TaskError(
        f"task {name!r}: attends_to holds a {type(parent).__name__}, expected "
        "tasks, or names of tasks."
      )
    known = isinstance(parent, Task)
    parents.append((parent.name, parent.digest) if known else (parent, ""))
  return parents


def save_task(task: Task, path: str | os.PathLike) -> None:
  """Writes a task to a directory; an older one there is replaced as a whole.

  Args:
    task: with values that are known and finite.
    path: of the directory.

  Raises:
    TaskError: for what is no task, where the path is there and is not a task,
      or the task could not be loaded again. Nothing is written then.
  """
  if not isinstance(task, Task):
    raise TaskError(
      f"save_task got a {type(task).__name__}, expected one Task (save_tasks "
      "writes several)."
    )
  path = Path(path).absolute()
  if path.exists() and not (path / manifest.FILE).is_file():
    raise TaskError(f"{path} exists and is not a task: it is left as it is.")
  flat = {k: np.asarray(v) for k, v in trees.flatten(task.params).items()}
  array_files.require_finite(flat, f"task {task.spec.name!r} cannot be saved")
  path.parent.mkdir(parents=True, exist_ok=True)
  # As `tidy` knows it.
  scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
  try:
    files = array_files.write(scratch / "new" / _ARRAYS, flat)
    arrays = {k: array_files.describe(v) for k, v in flat.items()}
    text = manifest.to_text(
      Manifest(
        spec=task.spec,
        arrays=arrays,
        files=files,
        provenance=task.provenance,
      ),
      str(path / manifest.FILE),
    )
    (scratch / "new" / manifest.FILE).write_text(text, encoding="utf-8")
    # Reading is strict, and another version of orbax may write otherwise.
    array_files.read(scratch / "new" / _ARRAYS, files, arrays)
    # The old one is moved out of the way, not deleted, until the new one is in
    # its place.
    if path.exists():
      path.rename(scratch / "old")
    try:
      (scratch / "new").rename(path)
    except OSError:
      if (scratch / "old").exists():
        (scratch / "old").rename(path)
      raise
  finally:
    shutil.rmtree(scratch)


def tidy(directory: Path) -> None:
  """Removes what `save_task` left where its process was killed.

  A task that had been moved out of the way by then is put back. No link is
  followed, and what `save_task` does not write is left alone.

  Args:
    directory: of tasks, to which nobody writes now.
  """
  for scratch in directory.glob(".*-????????"):
    found = _SCRATCH.fullmatch(scratch.name)
    if not found or scratch.is_symlink() or not scratch.is_dir():
      continue
    if {path.name for path in scratch.iterdir()} <= {"new", "old"}:
      old, place = scratch / "old", directory / found["name"]
      if old.exists() and not place.exists():
        old.rename(place)
      shutil.rmtree(scratch)


def load_task(path: str | os.PathLike, backbone: Backbone) -> Task:
  """Reads a task, for the backbone that it was trained on.

  Args:
    path: directory that `save_task` wrote.
    backbone: on which it will run.

  Raises:
    TaskError: for a directory that is not a task or is damaged, a format that
      is not known, or another backbone.
  """
  path = Path(path).absolute()
  found = manifest.read(path)
  require_backbone(found.spec, backbone.id)
  # What fits task.json fits the backbone that it names, unless that is a lie.
  shapes = trees.flatten(_shapes(backbone, found.spec))
  problems = trees.differences(shapes, found.arrays)
  if problems:
    raise TaskError(f"task in {path} does not fit: {listed(problems)}.")
  flat = read_arrays(path, found)
  params = trees.unflatten({k: jnp.asarray(v) for k, v in flat.items()})
  return Task(found.spec, params, found.provenance)


def read_arrays(path: Path, found: Manifest) -> dict[str, np.ndarray]:
  """Reads the arrays of a task without its backbone, and verifies them.

  Args:
    path: directory that `save_task` wrote.
    found: its manifest.

  Returns:
    {"cls": (d,), "memory": (l, m, d), "head/kernel": (d, c), "head/bias":
    (c,)}, float32; others in other regimes.

  Raises:
    TaskError: where they cannot be read, or are not what `task.json` says, or
      anything else lies in the directory.
  """
  files = [manifest.FILE, *(f"{_ARRAYS}/{name}" for name in found.files)]
  array_files.require_entries(path, files)
  return array_files.read(path / _ARRAYS, found.files, found.arrays)


def _shapes(backbone: Backbone, spec: TaskSpec) -> dict[str, Any]:
  """The parameters of a task on a backbone, as `jax.ShapeDtypeStruct`."""
  init = TaskParams(backbone.config, spec).init
  shapes = jax.eval_shape(init, jax.random.key(0))["params"]
  if "backbone" in REGIMES[spec.regime].trained:
    shapes["backbone"] = {
      part: backbone_shapes(backbone.config)[part] for part in _TRUNK
    }
  return shapes

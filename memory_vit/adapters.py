"""Tasks as objects: made, saved and loaded.

A saved task is a directory:

  task.json   what it is, readable: `TaskSpec`, the provenance, and for every
              array its shape, type and SHA-256
  arrays/     the parameters, written by orbax
"""

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memory_vit import records, trees
from memory_vit.backbone import Backbone, backbone_shapes
from memory_vit.errors import TaskError
from memory_vit.model import TaskParams
from memory_vit.regimes import REGIMES
from memory_vit.tasks import (
  EvalPreprocessing,
  Task,
  TaskSpec,
  require_backbone,
)

FORMAT_VERSION = 3
# Of a backbone, what is below its head.
_TRUNK = ("Transformer", "cls", "embedding")
_KEYS = ("format_version", "spec", "arrays", "provenance")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """What `task.json` says of an array.

  Attributes:
    shape: as saved.
    dtype: numpy's name of it.
    sha256: `trees.array_digest`.
  """

  shape: tuple[int, ...]
  dtype: str
  sha256: str


def init_task(
  key: jax.Array,
  backbone: Backbone,
  *,
  name: str,
  num_classes: int,
  cells: int = 5,
  regime: str = "memory_masked",
  bottleneck: int = 0,
  attends_to: Sequence[str | Task] = (),
  memory_norm: bool = True,
  memory_std: float = 0.02,
  cls_init: str = "pretrained",
  class_names: Sequence[str] = (),
  evaluation: EvalPreprocessing | None = None,
) -> Task:
  """A new task, before training.

  Args:
    key: of the random numbers.
    backbone: that it is for.
    name: see `TaskSpec`.
    num_classes: c.
    cells: m, memory cells per layer; 0 in a regime without memory.
    regime: how it will be learned, see `regimes`.
    bottleneck: width of adapters; 0 in a regime without.
    attends_to: the earlier tasks that it reads. Of a `Task`, not of a mere
      name, its digest is kept, and another of that name is refused later.
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
  """
  if cls_init not in ("pretrained", "normal"):
    raise TaskError(
      f"cls_init is {cls_init!r}, expected 'pretrained' or 'normal'."
    )
  if not (math.isfinite(memory_std) and memory_std > 0):
    raise TaskError(f"memory_std is {memory_std}, expected a positive number.")
  size = backbone.config.image_size
  parents = [
    (p.spec.name, p.digest) if isinstance(p, Task) else (p, "")
    for p in attends_to
  ]
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


def save_task(task: Task, path: str | os.PathLike) -> None:
  """Writes a task to a directory; an older one there is replaced as a whole.

  Raises:
    TaskError: where the path is there and is not a task.
  """
  path = Path(path).absolute()
  if path.exists() and not (path / "task.json").is_file():
    raise TaskError(f"{path} exists and is not a task: it is left as it is.")
  path.parent.mkdir(parents=True, exist_ok=True)
  scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
  try:
    flat = {k: np.asarray(v) for k, v in trees.flatten(task.params).items()}
    _save_arrays(scratch / "new" / "arrays", flat)
    text = json.dumps(_manifest(task, flat), indent=2, ensure_ascii=False)
    (scratch / "new" / "task.json").write_text(text + "\n", encoding="utf-8")
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
  manifest, spec = read_manifest(path), read_spec(path)
  require_backbone(spec, backbone.id)
  flat = read_arrays(path)
  shapes = _shapes(backbone, spec)
  # What fits task.json fits the backbone that it names, unless that is a lie.
  problems = trees.differences(trees.flatten(shapes), flat)
  if problems:
    raise TaskError(f"task in {path} does not fit: {'; '.join(problems)}.")
  params = trees.unflatten({k: jnp.asarray(v) for k, v in flat.items()})
  return Task(spec, params, manifest["provenance"])


def _shapes(backbone: Backbone, spec: TaskSpec) -> dict[str, Any]:
  """The parameters of a task on a backbone, as `jax.ShapeDtypeStruct`."""
  init = TaskParams(backbone.config, spec).init
  shapes = jax.eval_shape(init, jax.random.key(0))["params"]
  if "backbone" in REGIMES[spec.regime].trained:
    shapes["backbone"] = {
      part: backbone_shapes(backbone.config)[part] for part in _TRUNK
    }
  return shapes


def read_manifest(path: str | os.PathLike) -> dict[str, Any]:
  """Reads and checks the outer form of `task.json` in a task's directory."""
  file = Path(path) / "task.json"
  try:
    manifest = json.loads(file.read_text(encoding="utf-8"))
  except (FileNotFoundError, NotADirectoryError):
    raise TaskError(
      f"{path} is not a task: it has no task.json. Expected a directory that "
      "memory_vit exported, such as WORKDIR/tasks/NAME."
    ) from None
  except (OSError, ValueError) as error:  # of JSON and of UTF-8 among them
    raise TaskError(f"{file} is not readable as JSON: {error}") from error
  version = (
    manifest.get("format_version") if isinstance(manifest, dict) else None
  )
  if version != FORMAT_VERSION:
    raise TaskError(
      f"{file} has format_version {version!r}, this version of memory_vit "
      f"reads {FORMAT_VERSION}. Train the task again, or use the version that "
      "wrote it."
    )
  records.require_keys(manifest, _KEYS, str(file), TaskError)
  return manifest


def read_spec(path: str | os.PathLike) -> TaskSpec:
  """What a saved task is, without its arrays and without its backbone.

  Raises:
    TaskError: for a directory that is not a task, or a format that is not
      known.
  """
  spec = read_manifest(path)["spec"]
  where = f"{Path(path) / 'task.json'}: spec"
  return records.build(TaskSpec, spec, where, TaskError)


def read_stored(path: str | os.PathLike) -> dict[str, StoredArray]:
  """What `task.json` says of every array, by name.

  Raises:
    TaskError: as `read_spec`.
  """
  arrays = read_manifest(path)["arrays"]
  where = f"{Path(path) / 'task.json'}: arrays"
  if not isinstance(arrays, Mapping):
    raise TaskError(f"{where} is {arrays!r}, expected an object.")
  return {
    name: records.build(StoredArray, values, f"{where}.{name}", TaskError)
    for name, values in arrays.items()
  }


def read_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Reads the arrays of a task without its backbone, and verifies them.

  Args:
    path: directory that `save_task` wrote.

  Returns:
    {"cls": (d,), "memory": (l, m, d), "head/kernel": (d, c), "head/bias":
    (c,)}, float32.

  Raises:
    TaskError: where they cannot be read, or are not what `task.json` says.
  """
  path = Path(path).absolute()  # orbax takes no other
  stored = read_stored(path)
  _require_fit(path, read_spec(path), stored)
  arrays = _load_arrays(path / "arrays", stored)
  damaged = [
    name
    for name, array in arrays.items()
    if array.shape != stored[name].shape
    or array.dtype.name != stored[name].dtype
    or trees.array_digest(array) != stored[name].sha256
  ]
  if damaged:
    raise TaskError(
      f"arrays in {path} are damaged: {sorted(damaged)} are not what "
      "task.json says (shape, dtype, SHA-256)."
    )
  return arrays


def _require_fit(
  path: Path, spec: TaskSpec, stored: Mapping[str, StoredArray]
) -> None:
  """Raises unless the arrays can be those of such a task, on some backbone."""
  memory = stored["memory"].shape if "memory" in stored else ()
  kernel = stored["head/kernel"].shape if "head/kernel" in stored else ()
  width = kernel[0] if len(kernel) == 2 else 0
  shapes = {
    "head/kernel": (width, spec.num_classes),
    "head/bias": (spec.num_classes,),
  }
  regime = REGIMES[spec.regime]
  if "cls" in regime.trained:
    shapes["cls"] = (width,)
  if "memory" in regime.trained or regime.composes:
    layers = memory[0] if len(memory) == 3 else 0
    shapes["memory"] = (layers, spec.cells, width)
  expected = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
  # Adapters and backbones are compared where the backbone is known.
  described = {
    name: array
    for name, array in stored.items()
    if name.split("/")[0] not in set(regime.trained) & {"adapters", "backbone"}
  }
  problems = trees.differences(expected, described)
  if min(width, *(shape[0] for shape in shapes.values())) < 1:
    problems.append(f"an axis of {shapes} is empty")
  problems += [
    f"dtype of {name}: {array.dtype}, expected float32"
    for name, array in stored.items()
    if array.dtype != "float32"
  ]
  if problems:
    raise TaskError(
      f"{path / 'task.json'}: the arrays are not those of the task: "
      f"{'; '.join(problems)}."
    )


def _manifest(task: Task, flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
  return {
    "format_version": FORMAT_VERSION,
    "spec": dataclasses.asdict(task.spec),
    "arrays": {name: _describe(array) for name, array in flat.items()},
    "provenance": dict(task.provenance),
  }


def _describe(array: np.ndarray) -> dict[str, Any]:
  return {
    "shape": list(array.shape),
    "dtype": array.dtype.name,
    "sha256": trees.array_digest(array),
  }


def _save_arrays(path: Path, flat: Mapping[str, np.ndarray]) -> None:
  """Writes arrays with orbax, which takes none without values (0 cells)."""
  with _checkpointer() as checkpointer:
    checkpointer.save(path, {k: v for k, v in flat.items() if v.size})


def _load_arrays(
  path: Path, expected: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
  """Reads arrays of the expected names, shapes and types."""
  try:
    empty = {k: np.zeros(v.shape, v.dtype) for k, v in expected.items()}
    stored = {k: v for k, v in empty.items() if v.size}
    with _checkpointer() as checkpointer:
      read = checkpointer.restore(path, stored)
  # A damaged directory makes orbax raise many types, Exception among them.
  except Exception as error:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    raise TaskError(f"arrays in {path} cannot be read: {line}") from error
  return {**empty, **{k: np.asarray(v) for k, v in read.items()}}


def _checkpointer() -> Any:
  """One that waits for no other process: this one writes or reads alone."""
  import orbax.checkpoint as ocp  # only here: importing the core stays quick

  me = jax.process_index()
  options = ocp.options.MultiprocessingOptions(
    primary_host=me,
    active_processes={me},
    # Barriers of processes that read at the same time have names of their own.
    barrier_sync_key_prefix=f"process{me}",
  )
  return ocp.StandardCheckpointer(multiprocessing_options=options)

"""Saved states of a run, from which it resumes bitwise identically.

Only trained parameters are written, never the backbone; the position in the
data is a number (`data/batching.py`). Orbax writes the arrays and does not
notice later changes: checksums of all files and arrays lie beside them.

A step is a directory:

  00000040/arrays/     by orbax
  00000040/state.json  the rest of the state, and the checksums

It has this name only once it is complete; `scratch-...` is being written or
deleted, `corrupt-...` was found damaged. Other files are left alone. In a
bucket, nothing is renamed, and a step is complete once it has its `state.json`.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from memory_vit.errors import TrainingError
from memory_vit.exports import orbax_checkpoint
from memory_vit.model import trees
from memory_vit.runtime import (
  checksums,
  files,
  messages,
  processes,
  sharding,
)

logger = logging.getLogger(__name__)

_STEP = re.compile(r"[0-9]{8}|[1-9][0-9]{8,}")
_SCRATCH, _CORRUPT = "scratch-", "corrupt-"
_KEPT = 2


class Checkpoints:
  """The newest two saved states of a run, on one or several processes.

  Each contains the best parameters, see `LoopState`, so no third one is kept.
  """

  def __init__(self, directory: Path) -> None:
    """Open or make a directory in which nobody else writes."""
    self._directory = directory.absolute()  # orbax requires it
    # Synchronous: the state is small, and is on disk when `save` returns.
    self._arrays = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    processes.on_process_0(self._tidy)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *args: object) -> None:
    self.close()

  def close(self) -> None:
    """End the threads of orbax."""
    self._arrays.close()

  @property
  def directory(self) -> Path:
    return self._directory

  def steps(self) -> list[int]:
    """Steps of all saved states, oldest first; they are not verified."""
    found = filter(checksums.is_sealed, self._named_as_steps())
    return sorted(int(path.name) for path in found)

  def latest(self) -> int | None:
    """The newest undamaged step; None if nothing was saved.

    Damaged newer ones are renamed `corrupt-STEP`, and trained and saved again.
    If all are damaged, `TrainingError` is raised, and they stay where they are.
    """
    return processes.on_process_0(self._newest_whole)

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
    """Write a state and its JSON `meta`, then delete all but the newest two.

    If it cannot be written, earlier states stay as they are.
    """
    values = _with_values(state)
    arrays = _verifiable(values)
    scratch = files.begun(self._directory / _name_of(step), _SCRATCH)
    try:
      processes.on_process_0(lambda: self._begin(step, scratch))
      saved = ocp.args.StandardSave(values)
      with orbax_checkpoint.without_tracebacks():
        self._arrays.save(scratch / checksums.ARRAYS, args=saved)
      processes.on_process_0(lambda: self._finish(step, scratch, arrays, meta))
    except TrainingError:
      raise
    # Orbax and the reader below raise many types, Exception among them.
    except Exception as error:
      if processes.is_lost_partner(error):
        raise
      raise TrainingError(
        f"step {step} cannot be written to {self._directory}: "
        f"{messages.shortened(str(error))}\n"
        f"{self._left()} Make room, and give the same command again."
      ) from error

  def meta(self, step: int) -> dict[str, Any]:
    return checksums.read(self._directory / _name_of(step))["meta"]

  def restore(self, step: int, like: Any) -> Any:
    """Read a state and verify it.

    `like` is a state of the same structure, shapes, dtypes and shardings.
    """
    path = self._directory / _name_of(step)
    processes.on_process_0(lambda: checksums.require_whole(path))
    saved, expected = checksums.read(path)["arrays"], _with_values(like)
    _require_arrays(path, saved, expected)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, expected)
    try:
      args = ocp.args.StandardRestore(target)
      values = self._arrays.restore(path / checksums.ARRAYS, args=args)
    # A damaged directory makes orbax raise many types, Exception among them.
    except Exception as error:
      if processes.is_lost_partner(error):
        raise
      raise TrainingError(f"{path} cannot be read: {error}") from error
    damaged = [
      name
      for name, value in values.items()
      if _digest(value) != saved[name]["sha256"]
    ]
    if damaged:
      raise TrainingError(
        f"{path}: arrays {damaged} are not those that were saved (SHA-256), "
        "though its files are. Use the versions of orbax and tensorstore that "
        "wrote them."
      )
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    restored = (
      values[_leaf(path)] if np.size(leaf) else leaf for path, leaf in leaves
    )
    return jax.tree.unflatten(structure, restored)

  def _left(self) -> str:
    try:
      return f"The steps saved before, {self.steps()}, are as they were."
    except OSError as error:
      return f"The directory is not there any more ({error.strerror})."

  def _named_as_steps(self) -> list[Path]:
    found = self._directory.iterdir()
    return [path for path in found if _STEP.fullmatch(path.name)]

  def _tidy(self) -> None:
    """Remove directories that a killed process was writing or deleting."""
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      for path in self._directory.glob(f"{_SCRATCH}*"):
        _remove(path)
      for path in self._named_as_steps():
        if not checksums.is_sealed(path):
          _remove(path)
    except OSError as error:
      raise TrainingError(
        f"{self._directory} cannot hold the states of a run ({error}). Give "
        "another --workdir, or remove what is there."
      ) from error

  def _newest_whole(self) -> int | None:
    """See `latest`; it also ends the deletion of old states."""
    problems = {}
    for step in reversed(self.steps()):
      try:
        checksums.require_whole(self._directory / _name_of(step))
      except TrainingError as error:
        problems[step] = str(error)
        continue
      for broken, problem in problems.items():
        aside = self._set_aside(broken)
        logger.warning(
          "%s It is set aside as %s; going back to step %d.",
          problem, aside.name, step,
        )  # fmt: skip
      self._delete_old()
      return step
    corrupt = [str(path) for path in self._directory.glob(f"{_CORRUPT}*")]
    if problems or corrupt:
      raise TrainingError(
        f"no state in {self._directory} is whole. Put one back, or give "
        "another --workdir to begin again.\n  "
        + "\n  ".join([*problems.values(), *sorted(corrupt)])
      )
    return None

  def _set_aside(self, step: int) -> Path:
    path = self._directory / _name_of(step)
    aside, count = path.with_name(f"{_CORRUPT}{path.name}"), 1
    while aside.exists():
      count += 1
      aside = path.with_name(f"{_CORRUPT}{path.name}-{count}")
    path.rename(aside)
    return aside

  def _begin(self, step: int, scratch: Path) -> None:
    if checksums.is_sealed(self._directory / _name_of(step)):
      raise TrainingError(
        f"step {step} was not saved: {self._directory} already has steps "
        f"{self.steps()}."
      )
    _remove(scratch)  # of a save that failed in this process
    scratch.mkdir()

  def _finish(
    self,
    step: int,
    scratch: Path,
    arrays: Mapping[str, Any],
    meta: Mapping[str, Any],
  ) -> None:
    """Seal the files of orbax, and rename them to a step."""
    rest = {
      "meta": dict(meta),
      "arrays": dict(arrays),
    }
    checksums.seal(scratch, rest)
    files.finish(scratch, self._directory / _name_of(step))
    self._delete_old()

  def _delete_old(self) -> None:
    """Delete all states but the newest two; the newest must be undamaged."""
    for old in self.steps()[:-_KEPT]:
      # A half-deleted step must not count as one.
      path = self._directory / _name_of(old)
      files.remove_directory(path, f"{_SCRATCH}old-")


def _remove(path: Path) -> None:
  """Remove a directory, or anything else of this name; follows no link."""
  if path.is_dir() and not path.is_symlink():
    files.remove_directory(path)
  else:
    path.unlink(missing_ok=True)


def _name_of(step: int) -> str:
  return f"{step:08d}"


def _require_arrays(
  path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
  """Orbax casts other dtypes silently: refuse them."""
  wanted = _described(expected)
  found = {
    name: {key: described[key] for key in ("dtype", "shape")}
    for name, described in saved.items()
  }
  differ = [
    f"{name}: {found.get(name)}, expected {wanted.get(name)}"
    for name in sorted(found.keys() | wanted.keys())
    if found.get(name) != wanted.get(name)
  ]
  if differ:
    raise TrainingError(
      f"{path} belongs to another configuration. Give the one that the run "
      "began with, or another --workdir. Its arrays:\n  " + "\n  ".join(differ)
    )


def _with_values(state: Any) -> dict[str, Any]:
  """{path: leaf}, without the empty leaves (0 cells) that orbax refuses."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(state)
  return {_leaf(path): leaf for path, leaf in leaves if np.size(leaf)}


def _described(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """{name: dtype and shape}, as JSON returns them."""
  return {
    name: {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    for name, leaf in values.items()
  }


def _verifiable(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """{name: dtype, shape and checksum}; all processes must call."""
  # One after the other: each sharded array is gathered on the host.
  return {
    name: {**described, "sha256": _digest(values[name])}
    for name, described in _described(values).items()
  }


def _digest(value: Any) -> str:
  return trees.array_digest(sharding.to_host(value))


def _leaf(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")

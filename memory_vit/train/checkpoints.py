"""Saved states of a run, from which it resumes bitwise identically.

A state holds the trained parameters but not the backbone; the position in the
data is a single number (`data/batching.py`). Orbax writes the arrays, but does
not notice later changes, so the checksums of all files and arrays are saved.

Each step has a directory:

  00000040/arrays/     written by orbax
  00000040/state.json  the rest of the state, and the checksums

A directory gets this name once it is complete. Directories `scratch-...` are
being written or deleted, and `corrupt-...` were found damaged. Other files are
left alone. In a bucket nothing is renamed, and a step is complete once it has
its `state.json`.
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

  Each state includes the best parameters, see `LoopState`, so the state of the
  best step need not be kept.
  """

  def __init__(self, directory: Path) -> None:
    """Open or create the directory; no other run may write to it."""
    self._directory = directory.absolute()  # orbax requires absolute paths
    # The checkpointer is synchronous: states are on disk when `save` returns.
    self._arrays = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    processes.on_process_0(self._tidy)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *args: object) -> None:
    self.close()

  def close(self) -> None:
    """Stop the threads of orbax."""
    self._arrays.close()

  @property
  def directory(self) -> Path:
    return self._directory

  def steps(self) -> list[int]:
    """Return the steps of all saved states, ascending, without verification."""
    complete = filter(checksums.is_sealed, self._named_as_steps())
    return sorted(int(path.name) for path in complete)

  def latest(self) -> int | None:
    """Return the step of the newest undamaged state; None if nothing was saved.

    Newer, damaged states are renamed to `corrupt-STEP`; training repeats their
    steps. If all states are damaged, raise `TrainingError`, and rename nothing.
    """
    return processes.on_process_0(self._newest_whole)

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
    """Write a state and its JSON `meta`, then delete all but the newest two.

    If the state cannot be written, earlier states stay unchanged.
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
    # Catch `Exception`: orbax and its libraries raise many types of errors.
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
    # Catch `Exception`: damaged files make orbax raise many types of errors.
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
        f"{path}: arrays {damaged} do not match their saved SHA-256, although "
        "the files are intact. Use the versions of orbax and tensorstore that "
        "wrote the files."
      )
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    restored = (
      values[_leaf(path)] if np.size(leaf) else leaf for path, leaf in leaves
    )
    return jax.tree.unflatten(structure, restored)

  def _left(self) -> str:
    try:
      return f"The steps saved before, {self.steps()}, are unchanged."
    except OSError as error:
      return f"The directory no longer exists ({error.strerror})."

  def _named_as_steps(self) -> list[Path]:
    entries = self._directory.iterdir()
    return [path for path in entries if _STEP.fullmatch(path.name)]

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
        "another --workdir, or remove this path."
      ) from error

  def _newest_whole(self) -> int | None:
    """Return the step of the newest intact state; None if no state was saved.

    Rename newer states, which are damaged, and delete old states. Raise
    `TrainingError` if states were saved, but none of them is intact.
    """
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
          "%s The directory is renamed to %s; going back to step %d.",
          problem, aside.name, step,
        )  # fmt: skip
      self._delete_old()
      return step
    corrupt = [str(path) for path in self._directory.glob(f"{_CORRUPT}*")]
    if problems or corrupt:
      raise TrainingError(
        f"no saved state in {self._directory} is intact. Restore a copy, or "
        "give another --workdir to begin again.\n  "
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
        f"step {step} was not saved, because {self._directory} already has "
        f"this step. Saved steps: {self.steps()}."
      )
    # A save that failed in this process may have left files in `scratch`.
    _remove(scratch)
    scratch.mkdir()

  def _finish(
    self,
    step: int,
    scratch: Path,
    arrays: Mapping[str, Any],
    meta: Mapping[str, Any],
  ) -> None:
    """Complete a save: write checksums, rename `scratch`, delete old states."""
    rest = {
      "meta": dict(meta),
      "arrays": dict(arrays),
    }
    checksums.seal(scratch, rest)
    files.finish(scratch, self._directory / _name_of(step))
    self._delete_old()

  def _delete_old(self) -> None:
    """Delete all states but the newest two.

    Call this method only if the newest state is undamaged.
    """
    for old in self.steps()[:-_KEPT]:
      # Rename the directory first: a half-deleted state must not look complete.
      path = self._directory / _name_of(old)
      files.remove_directory(path, f"{_SCRATCH}old-")


def _remove(path: Path) -> None:
  """Remove a directory, file or link, but not the target of a link."""
  if path.is_dir() and not path.is_symlink():
    files.remove_directory(path)
  else:
    path.unlink(missing_ok=True)


def _name_of(step: int) -> str:
  return f"{step:08d}"


def _require_arrays(
  path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
  """Raise if saved and expected arrays differ in name, dtype or shape.

  Orbax itself would cast the saved arrays to the expected dtypes silently.
  """
  wanted = _described(expected)
  stored = {
    name: {key: described[key] for key in ("dtype", "shape")}
    for name, described in saved.items()
  }
  differ = [
    f"{name}: {stored.get(name)}, expected {wanted.get(name)}"
    for name in sorted(stored.keys() | wanted.keys())
    if stored.get(name) != wanted.get(name)
  ]
  if differ:
    raise TrainingError(
      f"{path} was saved with another configuration. Give the configuration "
      "that the run began with, or another --workdir. Arrays that differ:\n  "
      + "\n  ".join(differ)
    )


def _with_values(state: Any) -> dict[str, Any]:
  """Return {path: leaf} of a state, without empty leaves.

  Orbax refuses empty arrays, such as the memory array of a task with 0 cells.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(state)
  return {_leaf(path): leaf for path, leaf in leaves if np.size(leaf)}


def _described(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Describe arrays for JSON: {name: {"dtype": text, "shape": list}}."""
  return {
    name: {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    for name, leaf in values.items()
  }


def _verifiable(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Describe arrays as `_described` does, and add the "sha256" of each array.

  All processes must call this function.
  """
  # Hash one array at a time: `_digest` gathers the whole array on the host.
  return {
    name: {**described, "sha256": _digest(values[name])}
    for name, described in _described(values).items()
  }


def _digest(value: Any) -> str:
  return trees.array_digest(sharding.to_host(value))


def _leaf(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")

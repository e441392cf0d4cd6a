"""The state of a run on disk: what is needed to go on as if nothing happened.

Only what is trained is written, never the backbone; the position in the data is
a number (`data.py`).
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from memory_vit.errors import TrainingError

_ARRAYS = "arrays"


class Checkpoints:
  """The newest two saved states of a run.

  What was best on validation is a part of each state, see `train.Past`.
  """

  def __init__(self, directory: Path) -> None:
    # Synchronous: the state is small, and a step that was saved is saved.
    options = ocp.CheckpointManagerOptions(
      max_to_keep=2,
      cleanup_tmp_directories=True,
      enable_async_checkpointing=False,
    )
    self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

  def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
    """Writes a state.

    Args:
      step: its number; a step is written once.
      state: tree of arrays.
      meta: what JSON can hold.

    Raises:
      TrainingError: where nothing was written.
    """
    values = _with_values(state)
    saved = self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(values),
        meta=ocp.args.JsonSave({**meta, _ARRAYS: _described(values)}),
      ),
    )
    if not saved:
      raise TrainingError(
        f"step {step} was not saved: {self._manager.directory} already has "
        f"steps {self._manager.all_steps()}."
      )

  @property
  def directory(self) -> Path:
    """Where the states lie."""
    return Path(self._manager.directory)

  def latest(self) -> int | None:
    """The newest step, or None."""
    return self._manager.latest_step()

  def meta(self, step: int) -> dict[str, Any]:
    """What was saved beside the state."""
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    meta = self._manager.restore(step, args=args).meta
    return {key: value for key, value in meta.items() if key != _ARRAYS}

  def restore(self, step: int, like: Any) -> Any:
    """Reads a state.

    Args:
      step: its number.
      like: a state of the same structure, shapes, types and shardings.

    Raises:
      TrainingError: where the saved state has another structure, or is damaged.
    """
    expected = _with_values(like)
    try:
      self._require_arrays(step, _described(expected))
      target = jax.tree.map(ocp.utils.to_shape_dtype_struct, expected)
      args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
      values = self._manager.restore(step, args=args).state
    except TrainingError:
      raise
    # A damaged directory makes orbax raise many types, Exception among them.
    except Exception as error:
      raise TrainingError(
        f"step {step} in {self._manager.directory} is damaged: {error}"
      ) from error
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    return structure.unflatten(
      values[_name(path)] if np.size(leaf) else leaf for path, leaf in leaves
    )

  def _require_arrays(self, step: int, expected: dict[str, Any]) -> None:
    """Says it in our words: orbax casts other types without any."""
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    found = self._manager.restore(step, args=args).meta[_ARRAYS]
    differ = [
      f"{name}: {found.get(name)}, expected {expected.get(name)}"
      for name in sorted(found.keys() | expected.keys())
      if found.get(name) != expected.get(name)
    ]
    if differ:
      raise TrainingError(
        f"step {step} in {self._manager.directory} belongs to another "
        "configuration. Give the one that the run began with, or another "
        "--workdir. Its arrays (type and shape):\n  " + "\n  ".join(differ)
      )

  def close(self) -> None:
    """Waits for what is being written."""
    self._manager.close()


def _with_values(state: Any) -> dict[str, Any]:
  """{path: leaf}, without the empty leaves (0 cells) that orbax refuses."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(state)
  return {_name(path): leaf for path, leaf in leaves if np.size(leaf)}


def _described(values: dict[str, Any]) -> dict[str, list[Any]]:
  """{name: [dtype, *shape]}, as JSON gives it back."""
  return {name: [str(leaf.dtype), *leaf.shape] for name, leaf in values.items()}


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")

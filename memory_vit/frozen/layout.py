"""One row of what is kept: all that a forward pass hands on of an image."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RowLayout:
  """The leaves of a row, side by side.

  Attributes:
    treedef: of the tree that `SplitForward.prepare` returns.
    shapes: of its leaves, without the axis of the images.
    computed: their dtypes, as a step reads them.
    kept: their dtypes, as they are kept.
  """

  treedef: Any
  shapes: tuple[tuple[int, ...], ...]
  computed: tuple[np.dtype, ...]
  kept: tuple[np.dtype, ...]

  @classmethod
  def of(cls, inputs: Any, dtype: str) -> "RowLayout":
    """The layout of a tree of arrays (b, ...), or of their shapes.

    Args:
      inputs: from `SplitForward.prepare`.
      dtype: "bfloat16" where float32 values are rounded to that.
    """
    leaves, treedef = jax.tree.flatten(inputs)
    computed = tuple(np.dtype(leaf.dtype) for leaf in leaves)
    rounded = np.dtype(jnp.bfloat16)
    kept = tuple(
      rounded if dtype == "bfloat16" and d == np.float32 else d
      for d in computed
    )
    shapes = tuple(leaf.shape[1:] for leaf in leaves)
    return cls(treedef, shapes, computed, kept)

  @property
  def dtype(self) -> np.dtype:
    """A row as a NumPy type with a field for each leaf, "0", "1", ..."""
    fields = zip(self.kept, self.shapes, strict=True)
    return np.dtype([(str(i), *field) for i, field in enumerate(fields)])

  @property
  def nbytes(self) -> int:
    """Bytes of a row."""
    return self.dtype.itemsize

  def fill(self, rows: np.ndarray, inputs: Any) -> None:
    """Write a tree of host arrays (b, ...) to the first of some rows.

    Where there are fewer than b, what is left is padding.
    """
    for i, leaf in enumerate(jax.tree.leaves(inputs)):
      count = min(len(rows), len(leaf))
      rows[str(i)][:count] = leaf[:count]

  def gather(self, rows: np.ndarray, places: np.ndarray) -> Any:
    """Rows (n,), places (b,) -> a tree of host arrays (b, ...)."""
    leaves = [rows[str(i)][places] for i in range(len(self.shapes))]
    return jax.tree.unflatten(self.treedef, leaves)

  def narrow(self, inputs: Any) -> Any:
    """Computed inputs -> the types in which they are kept, on the device."""
    return self._cast(inputs, self.kept)

  def widen(self, inputs: Any) -> Any:
    """Kept inputs -> the types in which they were computed, on the device."""
    return self._cast(inputs, self.computed)

  def _cast(self, inputs: Any, dtypes: tuple[np.dtype, ...]) -> Any:
    leaves = jax.tree.leaves(inputs)
    if all(a.dtype == d for a, d in zip(leaves, dtypes, strict=True)):
      return inputs
    return jax.tree.unflatten(self.treedef, _cast(leaves, dtypes))


@functools.partial(jax.jit, static_argnames="dtypes")
def _cast(
  leaves: list[jax.Array], dtypes: tuple[np.dtype, ...]
) -> list[jax.Array]:
  return [a.astype(d) for a, d in zip(leaves, dtypes, strict=True)]

"""One cached row: all that the frozen pass hands on of an image."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RowLayout:
  """The leaves of a row.

  Attributes:
    treedef: of the tree that `SplitForward.prepare` returns.
    shapes: of its leaves, without the axis of the images.
    computed: their dtypes, as a step reads them.
    kept: their dtypes, as they are stored.
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
  def nbytes(self) -> int:
    """Bytes of a row."""
    leaves = zip(self.kept, self.shapes, strict=True)
    return sum(d.itemsize * math.prod(shape) for d, shape in leaves)

  def empty(self, count: int) -> list[np.ndarray]:
    """Memory for the leaves (n, ...) of n rows, taken when it is written."""
    leaves = zip(self.kept, self.shapes, strict=True)
    return [np.empty((count, *shape), d) for d, shape in leaves]

  def narrow(self, inputs: Any) -> Any:
    """Computed inputs -> the types in which they are stored, on the device."""
    return self._cast(inputs, self.kept)

  def widen(self, inputs: Any) -> Any:
    """Stored inputs -> the types in which they were computed, on the device."""
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

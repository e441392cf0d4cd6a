"""Cached rows in memory: on the devices, or on the host.

Every process has rows of its own, and takes its share of a batch from them: no
row crosses the network.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memory_vit.runtime import sharding

Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowLayout:
  """The leaves of a row.

  Attributes:
    treedef: of the tree that `SplitForward.prepare` returns.
    shapes: of its leaves, without the axis of the images.
    computed: their dtypes, as a step reads them.
    stored: their dtypes, as they are stored.
  """

  treedef: Any
  shapes: tuple[tuple[int, ...], ...]
  computed: tuple[np.dtype, ...]
  stored: tuple[np.dtype, ...]

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
    stored = tuple(
      rounded if dtype == "bfloat16" and d == np.float32 else d
      for d in computed
    )
    shapes = tuple(leaf.shape[1:] for leaf in leaves)
    return cls(treedef, shapes, computed, stored)

  @property
  def nbytes(self) -> int:
    """Bytes of a row."""
    leaves = zip(self.stored, self.shapes, strict=True)
    return sum(d.itemsize * math.prod(shape) for d, shape in leaves)

  def empty(self, count: int) -> list[np.ndarray]:
    """Memory for the leaves (n, ...) of n rows, taken when it is written."""
    leaves = zip(self.stored, self.shapes, strict=True)
    return [np.empty((count, *shape), d) for d, shape in leaves]

  def narrow(self, inputs: Any) -> Any:
    """Computed inputs -> the types in which they are stored, on the device."""
    return self._cast(inputs, self.stored)

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


class FilledRows(Protocol):
  """Rows by place.

  Attributes:
    labels: int32 (n,).
    masks: float32 (n,), 1 for examples that count in an evaluation.
  """

  labels: np.ndarray
  masks: np.ndarray

  def take(self, places: np.ndarray) -> Any:
    """The rows int64 (b,) of this process, as a batch of all processes."""


class Rows(abc.ABC):
  """Rows by place, which are put there first; see `FilledRows`."""

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range
  ) -> None:
    """Make room for rows.

    Args:
      layout: of a row.
      count: n.
      mesh: over which a batch is split.
      places: at which the batches of this process start.
    """
    self._layout, self._mesh, self._places = layout, mesh, places
    self.labels = np.zeros(count, np.int32)
    self.masks = np.zeros(count, np.float32)

  def put(self, start: int, inputs: Any, batch: Batch) -> None:
    """Store a computed batch.

    Args:
      start: place of its first row of this process.
      inputs: what the frozen pass made of the batch, of all processes.
      batch: "label" and "mask" of the rows of this process; what lies behind
        the last place is padding.
    """
    part = slice(start, min(start + self._places.step, len(self.labels)))
    count = len(self.labels[part])
    self.labels[part] = batch["label"][:count]
    self.masks[part] = batch["mask"][:count]
    self._put(part, self._layout.narrow(inputs))

  @abc.abstractmethod
  def _put(self, part: slice, inputs: Any) -> None:
    """Store the inputs of a batch, whose rows without padding are a slice."""

  @abc.abstractmethod
  def take(self, places: np.ndarray) -> Any:
    """The rows int64 (b,) of this process, as a batch of all processes."""

  def _to_host(self, inputs: Any) -> list[np.ndarray]:
    """The leaves (b, ...) of the rows of this process, of a batch of all."""
    return [np.asarray(leaf) for leaf in self._own(inputs)]

  def _own(self, inputs: Any) -> list[jax.Array]:
    return multihost_utils.global_array_to_host_local_array(
      jax.tree.leaves(inputs), self._mesh, sharding.by_rows(self._mesh).spec
    )

  def _to_devices(self, leaves: list[np.ndarray]) -> Any:
    """The leaves (b, ...) of rows of this process -> a batch of all."""
    batch = jax.tree.unflatten(self._layout.treedef, leaves)
    return self._layout.widen(sharding.shard_batch(batch, self._mesh))


class OrderedRows:
  """Rows in another order than that in which they are stored."""

  def __init__(self, rows: FilledRows, places: np.ndarray) -> None:
    """Give each of n places the place in `rows` that `places` (n,) says."""
    self._rows, self._places = rows, places
    self.labels, self.masks = rows.labels[places], rows.masks[places]

  def take(self, places: np.ndarray) -> Any:
    """See `FilledRows`."""
    return self._rows.take(self._places[places])


class HostRows(Rows):
  """Rows in the memory of the host."""

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range
  ) -> None:
    """See `Rows`."""
    super().__init__(layout, count, mesh, places)
    self._leaves = layout.empty(count)

  def _put(self, part: slice, inputs: Any) -> None:
    for rows, leaf in zip(self._leaves, self._to_host(inputs), strict=True):
      rows[part] = leaf[: len(rows[part])]

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`."""
    return self._to_devices([rows[places] for rows in self._leaves])


class DeviceRows(Rows):
  """Rows on the devices, each of which has its share of every batch.

  They are taken by a compiled program; no row comes to the host.
  """

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range
  ) -> None:
    """Make room for whole batches; see `Rows`."""
    super().__init__(layout, count, mesh, places)
    batches, rows = len(places), places.step
    # Of several processes, the devices of this one.
    self._local = sharding.by_rows(mesh.local_mesh)
    across = NamedSharding(
      mesh.local_mesh, PartitionSpec(None, *self._local.spec)
    )

    def empty() -> Any:
      leaves = zip(layout.shapes, layout.stored, strict=True)
      return [jnp.zeros((batches, rows, *shape), d) for shape, d in leaves]

    self._leaves = jax.jit(empty, out_shardings=across)()
    self._write = jax.jit(_put, donate_argnums=0, out_shardings=across)
    self._gather = jax.jit(_take, out_shardings=self._local)

  def _put(self, part: slice, inputs: Any) -> None:
    batch = part.start // self._places.step
    self._leaves = self._write(self._leaves, self._own(inputs), batch)

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`."""
    batch, row = np.divmod(places.astype(np.int32), np.int32(self._places.step))
    leaves = multihost_utils.host_local_array_to_global_array(
      self._gather(self._leaves, batch, row),
      self._mesh,
      sharding.by_rows(self._mesh).spec,
    )
    return self._layout.widen(jax.tree.unflatten(self._layout.treedef, leaves))


def _put(
  stored: list[jax.Array], leaves: list[jax.Array], batch: jax.Array
) -> list[jax.Array]:
  """Write a batch; along the first axis nothing is split over devices."""
  update = functools.partial(
    jax.lax.dynamic_update_index_in_dim, index=batch, axis=0
  )
  return [update(a, leaf) for a, leaf in zip(stored, leaves, strict=True)]


def _take(
  stored: list[jax.Array], batch: jax.Array, row: jax.Array
) -> list[jax.Array]:
  """Gather rows; the clamping of any other mode takes ten times as long."""
  return [a.at[batch, row].get(mode="promise_in_bounds") for a in stored]

"""Cached rows in memory, on the devices or the host."""

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
  """Shapes and dtypes of a row, the pytree of cached inputs of one image."""

  treedef: Any
  shapes: tuple[tuple[int, ...], ...]  # leaf shapes without the batch axis
  computed: tuple[np.dtype, ...]
  stored: tuple[np.dtype, ...]
  label: np.dtype  # the `label_dtype` of the split

  @classmethod
  def of(cls, inputs: Any, dtype: str, label: np.dtype) -> "RowLayout":
    """Derive the layout from a pytree of arrays or `ShapeDtypeStruct` (b, ...).

    With `dtype` "bfloat16", float32 leaves are stored as bfloat16.
    """
    leaves, treedef = jax.tree.flatten(inputs)
    computed = tuple(np.dtype(leaf.dtype) for leaf in leaves)
    rounded = np.dtype(jnp.bfloat16)
    stored = tuple(
      rounded if dtype == "bfloat16" and d == np.float32 else d
      for d in computed
    )
    shapes = tuple(leaf.shape[1:] for leaf in leaves)
    return cls(treedef, shapes, computed, stored, label)

  @property
  def nbytes(self) -> int:
    leaves = zip(self.stored, self.shapes, strict=True)
    return sum(d.itemsize * math.prod(shape) for d, shape in leaves)

  def empty(self, count: int) -> list[np.ndarray]:
    """Reserve memory for rows; the system allocates pages on first writes."""
    leaves = zip(self.stored, self.shapes, strict=True)
    return [np.empty((count, *shape), d) for d, shape in leaves]

  def narrow(self, inputs: Any) -> Any:
    """Cast computed inputs to their stored dtypes, on the device."""
    return self._cast(inputs, self.stored)

  def widen(self, inputs: Any) -> Any:
    """Cast stored inputs back to the dtypes before `narrow`, on the device."""
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
  """Rows by place; `masks` (n,) is 0 for rows that evaluation must ignore."""

  labels: np.ndarray
  masks: np.ndarray

  def take(self, places: np.ndarray) -> Any:
    """Gather this process's rows at places int64 (b,) into a global batch."""


class Rows(abc.ABC):
  """Rows by place: `put` stores a row, and then `take` returns it.

  Each process takes its share of a batch from its own rows, so that no row
  crosses the network.
  """

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range
  ) -> None:
    """Reserve `count` rows; their places are 0 to `count` - 1.

    `places` has an entry for each batch: the place of the batch's first row.
    The step of `places` is the number of rows of a batch in this process.
    """
    self._layout, self._mesh, self._places = layout, mesh, places
    self.labels = np.zeros(count, layout.label)
    self.masks = np.zeros(count, np.float32)

  def put(self, start: int, inputs: Any, batch: Batch) -> None:
    """Store a computed batch; `start` is the place of this process's first row.

    `inputs` are global arrays of all processes; `batch` has "label" and "mask"
    of this process. Rows after the last place are padding.
    """
    part = slice(start, min(start + self._places.step, len(self.labels)))
    count = len(self.labels[part])
    self.labels[part] = batch["label"][:count]
    self.masks[part] = batch["mask"][:count]
    self._put(part, self._layout.narrow(inputs))

  @abc.abstractmethod
  def _put(self, part: slice, inputs: Any) -> None:
    """Store the first rows of `inputs` in the places of the slice `part`.

    Further rows of `inputs`, for which `part` has no places, are padding.
    """

  @abc.abstractmethod
  def take(self, places: np.ndarray) -> Any:
    """See `FilledRows`."""

  def _to_host(self, inputs: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in self._own(inputs)]

  def _own(self, inputs: Any) -> list[jax.Array]:
    return multihost_utils.global_array_to_host_local_array(
      jax.tree.leaves(inputs), self._mesh, sharding.by_rows(self._mesh).spec
    )

  def _to_devices(self, leaves: list[np.ndarray]) -> Any:
    batch = jax.tree.unflatten(self._layout.treedef, leaves)
    return self._layout.widen(sharding.shard_batch(batch, self._mesh))


class OrderedRows:
  """Rows in a new order: row i is row `places[i]` of the given `rows`."""

  def __init__(self, rows: FilledRows, places: np.ndarray) -> None:
    self._rows, self._places = rows, places
    self.labels, self.masks = rows.labels[places], rows.masks[places]

  def take(self, places: np.ndarray) -> Any:
    return self._rows.take(self._places[places])


class HostRows(Rows):
  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range
  ) -> None:
    super().__init__(layout, count, mesh, places)
    self._leaves = layout.empty(count)

  def _put(self, part: slice, inputs: Any) -> None:
    for rows, leaf in zip(self._leaves, self._to_host(inputs), strict=True):
      rows[part] = leaf[: len(rows[part])]

  def take(self, places: np.ndarray) -> Any:
    return self._to_devices([rows[places] for rows in self._leaves])


class DeviceRows(Rows):
  """Rows in device memory; each device has its share of every batch."""

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range
  ) -> None:
    super().__init__(layout, count, mesh, places)
    batches, rows = len(places), places.step
    # Rows are sharded over the devices of this process only.
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
  """Return `stored`, with the batch of index `batch` replaced by `leaves`."""
  update = functools.partial(
    jax.lax.dynamic_update_index_in_dim, index=batch, axis=0
  )
  return [update(a, leaf) for a, leaf in zip(stored, leaves, strict=True)]


def _take(
  stored: list[jax.Array], batch: jax.Array, row: jax.Array
) -> list[jax.Array]:
  """Return the rows of each stored array at the indices (`batch`, `row`)."""
  # If `get` clamped the indices, it would take ten times as long.
  return [a.at[batch, row].get(mode="promise_in_bounds") for a in stored]

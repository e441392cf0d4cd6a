"""Cached rows in memory: on the devices, or on the host.

Every process has rows of its own, and takes its share of a batch from them: no
row crosses the network.
"""

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memory_vit.frozen.layout import RowLayout
from memory_vit.runtime import sharding

Batch = Mapping[str, np.ndarray]


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


class Rows(FilledRows, Protocol):
  """Rows by place, which are put there first."""

  def put(self, start: int, inputs: Any, batch: Batch) -> None:
    """Store a computed batch.

    Args:
      start: place of its first row of this process.
      inputs: what the frozen pass made of the batch, of all processes.
      batch: "label" and "mask" of the rows of this process; what lies behind
        the last place is padding.
    """


class OrderedRows:
  """Rows in another order than that in which they are stored."""

  def __init__(self, rows: FilledRows, places: np.ndarray) -> None:
    """Give rows other places.

    Args:
      rows: n of them.
      places: int64 (n,), place here -> place in `rows`.
    """
    self._rows, self._places = rows, places
    self.labels, self.masks = rows.labels[places], rows.masks[places]

  def take(self, places: np.ndarray) -> Any:
    """See `FilledRows`."""
    return self._rows.take(self._places[places])


class HostRows:
  """Rows in the memory of the host; see `Rows`."""

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
    self._layout, self._mesh = layout, mesh
    self._leaves = layout.empty(count)
    self.labels, self.masks = empty_labels(count)

  def put(self, start: int, inputs: Any, batch: Batch) -> None:
    """See `Rows`."""
    count = put_labels(self, start, batch)
    leaves = to_host(self._layout.narrow(inputs), self._mesh)
    for rows, leaf in zip(self._leaves, leaves, strict=True):
      rows[start : start + count] = leaf[:count]

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`."""
    leaves = [rows[places] for rows in self._leaves]
    batch = jax.tree.unflatten(self._layout.treedef, leaves)
    return self._layout.widen(sharding.shard_batch(batch, self._mesh))


class DeviceRows:
  """Rows on the devices, each of which has its share of every batch.

  They are taken by a compiled program; no row comes to the host.
  """

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range
  ) -> None:
    """Make room for whole batches; for the arguments see `HostRows`."""
    self._layout, self._mesh, self._places = layout, mesh, places
    self.labels, self.masks = empty_labels(count)
    batches, rows = len(places), places.step
    # Of several processes, the devices of this one.
    self._local = sharding.by_rows(mesh.local_mesh)
    across = NamedSharding(
      mesh.local_mesh, PartitionSpec(None, *self._local.spec)
    )

    def empty() -> Any:
      leaves = zip(layout.shapes, layout.kept, strict=True)
      return [jnp.zeros((batches, rows, *shape), d) for shape, d in leaves]

    self._leaves = jax.jit(empty, out_shardings=across)()
    self._put = jax.jit(_put, donate_argnums=0, out_shardings=across)
    self._take = jax.jit(_take, out_shardings=self._local)

  def put(self, start: int, inputs: Any, batch: Batch) -> None:
    """See `Rows`."""
    put_labels(self, start, batch)
    leaves = jax.tree.leaves(self._layout.narrow(inputs))
    local = multihost_utils.global_array_to_host_local_array(
      leaves, self._mesh, sharding.by_rows(self._mesh).spec
    )
    self._leaves = self._put(self._leaves, local, start // self._places.step)

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`."""
    batch, row = np.divmod(places.astype(np.int32), np.int32(self._places.step))
    leaves = multihost_utils.host_local_array_to_global_array(
      self._take(self._leaves, batch, row),
      self._mesh,
      sharding.by_rows(self._mesh).spec,
    )
    return self._layout.widen(jax.tree.unflatten(self._layout.treedef, leaves))


def empty_labels(count: int) -> tuple[np.ndarray, np.ndarray]:
  """Room for labels and masks."""
  return np.zeros(count, np.int32), np.zeros(count, np.float32)


def put_labels(rows: Rows, start: int, batch: Batch) -> int:
  """Store labels and masks of a batch without its padding; count its rows."""
  count = len(rows.labels[start : start + len(batch["label"])])
  rows.labels[start : start + count] = batch["label"][:count]
  rows.masks[start : start + count] = batch["mask"][:count]
  return count


def to_host(inputs: Any, mesh: Mesh) -> list[np.ndarray]:
  """The leaves (b, ...) of the rows of this process, of a batch of all."""
  local = multihost_utils.global_array_to_host_local_array(
    inputs, mesh, sharding.by_rows(mesh).spec
  )
  return [np.asarray(leaf) for leaf in jax.tree.leaves(local)]


def _put(
  kept: list[jax.Array], leaves: list[jax.Array], batch: jax.Array
) -> list[jax.Array]:
  """Write a batch; along the first axis nothing is split over devices."""
  update = functools.partial(
    jax.lax.dynamic_update_index_in_dim, index=batch, axis=0
  )
  return [update(a, leaf) for a, leaf in zip(kept, leaves, strict=True)]


def _take(
  kept: list[jax.Array], batch: jax.Array, row: jax.Array
) -> list[jax.Array]:
  """Gather rows; the clamping of any other mode takes ten times as long."""
  return [a.at[batch, row].get(mode="promise_in_bounds") for a in kept]

"""Kept rows in memory: on the devices, or on the host.

Every process has rows of its own, and takes its share of a batch from them: no
row crosses the network.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memory_vit.kept.layout import RowLayout
from memory_vit.runtime import sharding


class Rows(Protocol):
  """Rows by place."""

  def put(self, start: int, inputs: Any) -> None:
    """Keep a computed batch; its first row of this process is at `start`."""

  def take(self, places: np.ndarray) -> Any:
    """The rows int64 (b,) of this process, as a batch of all processes."""


class HostRows:
  """Rows in the memory of the host."""

  def __init__(self, layout: RowLayout, count: int, mesh: Mesh) -> None:
    """Make room for `count` rows; a page is taken when it is written."""
    self._layout, self._mesh = layout, mesh
    self._rows = np.zeros(count, layout.dtype)

  def put(self, start: int, inputs: Any) -> None:
    """See `Rows`; what lies behind the last place is padding."""
    leaves = jax.tree.leaves(to_host(self._layout.narrow(inputs), self._mesh))
    rows = self._rows[start : start + len(leaves[0])]
    for i, leaf in enumerate(leaves):
      rows[str(i)] = leaf[: len(rows)]

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`."""
    batch = self._layout.gather(self._rows, places)
    return self._layout.widen(sharding.shard_batch(batch, self._mesh))


class DeviceRows:
  """Rows on the devices, each of which has its share of every batch.

  They are taken by a compiled program; no row comes to the host.
  """

  def __init__(
    self, layout: RowLayout, batches: int, mesh: Mesh, rows: int
  ) -> None:
    """Make room for some batches of `rows` rows of this process each."""
    self._layout, self._mesh, self._batch = layout, mesh, rows
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

  def put(self, start: int, inputs: Any) -> None:
    """See `Rows`."""
    leaves = jax.tree.leaves(self._layout.narrow(inputs))
    local = multihost_utils.global_array_to_host_local_array(
      leaves, self._mesh, sharding.by_rows(self._mesh).spec
    )
    self._leaves = self._put(self._leaves, local, start // self._batch)

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`."""
    batch, row = np.divmod(places.astype(np.int32), np.int32(self._batch))
    leaves = multihost_utils.host_local_array_to_global_array(
      self._take(self._leaves, batch, row),
      self._mesh,
      sharding.by_rows(self._mesh).spec,
    )
    return self._layout.widen(jax.tree.unflatten(self._layout.treedef, leaves))


def to_host(inputs: Any, mesh: Mesh) -> Any:
  """The rows of this process of a batch of all, as a tree of NumPy arrays."""
  local = multihost_utils.global_array_to_host_local_array(
    inputs, mesh, sharding.by_rows(mesh).spec
  )
  return jax.tree.map(np.asarray, local)


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

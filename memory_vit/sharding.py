"""Where arrays lie: a mesh with one axis, "data", over all devices.

Batches are split along it, everything else is replicated.
"""

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from memory_vit.errors import ConfigError


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Devices in a row; by default all of all processes."""
  devices = jax.devices() if devices is None else devices
  # Without the axis type jax makes an explicit mesh, for which every operation
  # would have to name its sharding.
  return jax.make_mesh(
    (len(devices),),
    ("data",),
    axis_types=(AxisType.Auto,),
    devices=devices,
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """The same values on every device."""
  return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
  """A batch split along its first axis."""
  return NamedSharding(mesh, PartitionSpec("data"))


def require_divisible(batch_size: int, mesh: Mesh, key: str) -> None:
  """Raises `ConfigError` unless a batch splits evenly over the devices."""
  if batch_size % mesh.size:
    raise ConfigError(
      f"{key} is {batch_size}, expected a multiple of the {mesh.size} devices."
    )


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
  """The rows of this process -> global arrays, split along "data"."""
  sharding = by_rows(mesh)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows)
    for name, rows in batch.items()
  }


def known_to_any(numbers: Collection[int], limit: int) -> list[int]:
  """Numbers that at least one process knows, sorted.

  Args:
    numbers: at most `limit`, none negative, that this process knows.
    limit: the same on all processes.
  """
  padded = np.full(limit, -1, np.int64)
  padded[: len(numbers)] = sorted(numbers)
  # Without limit there are none, and nothing to say to each other.
  everywhere = multihost_utils.process_allgather(padded) if limit else padded
  return sorted({int(n) for n in everywhere.ravel()} - {-1})


def prefetch(
  batches: Iterator[dict[str, np.ndarray]], mesh: Mesh, size: int = 2
) -> Iterator[dict[str, Any]]:
  """Sends batches to the devices ahead of their use; `size` are on the way."""
  queue = collections.deque()
  for batch in batches:
    queue.append(shard_batch(batch, mesh))
    if len(queue) >= size:
      yield queue.popleft()
  yield from queue

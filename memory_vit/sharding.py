"""Where arrays lie: a mesh with one axis, "data", over all devices.

Batches are split along it, everything else is replicated.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
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

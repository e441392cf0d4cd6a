"""The placement of arrays on a mesh ("data", "fsdp") of all devices.

Batches are split over both axes. The large arrays of a backbone are split over
"fsdp" (fully sharded data parallelism): each device stores a part, and a layer
is gathered when it is used. All other arrays are replicated.
"""

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from memory_vit.errors import ConfigError

# Arrays below this key of a tree are split over the mesh axis "fsdp".
_IN_PARTS = "backbone"
_ROWS = ("data", "fsdp")
# Arrays with fewer values are not split: splitting would save little memory,
# and gathering takes time. All biases and LayerNorm parameters are smaller.
_LEAST = 2**14


def make_mesh(
  devices: Sequence[jax.Device] | None = None, fsdp: int = 1
) -> Mesh:
  """Make a mesh with the axes ("data", "fsdp").

  Args:
    devices: by default the devices of all processes.
    fsdp: the number of devices that a backbone is split over. They are
      neighbors, and thus on the same host if it has enough devices.

  Raises:
    ConfigError: if the number of devices is not a multiple of `fsdp`.
  """
  devices = jax.devices() if devices is None else devices
  if fsdp < 1 or len(devices) % fsdp:
    raise ConfigError(
      f"config.mesh.fsdp (--fsdp) is {fsdp}, expected a divisor of the "
      f"{len(devices)} devices."
    )
  # JAX's default is `AxisType.Explicit`. With this type, our operations would
  # have to name the shardings of their results.
  shape, axis_types = (len(devices) // fsdp, fsdp), (AxisType.Auto,) * 2
  return jax.make_mesh(shape, _ROWS, axis_types=axis_types, devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(_ROWS))


def in_parts(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
  """Split the longest axis that is divisible by the size of "fsdp", if any."""
  parts = mesh.shape["fsdp"]
  axes = [axis for axis, length in enumerate(shape) if length % parts == 0]
  if parts == 1 or not axes or np.prod(shape) < _LEAST:
    return replicated(mesh)
  split = max(axes, key=lambda axis: shape[axis])
  names = ["fsdp" if axis == split else None for axis in range(len(shape))]
  return NamedSharding(mesh, PartitionSpec(*names))


def layout(tree: Any, mesh: Mesh) -> Any:
  """Return the shardings of a tree, such as a training state or gradients."""
  key = jax.tree_util.DictKey(_IN_PARTS)
  return jax.tree.map_with_path(
    lambda path, leaf: (
      in_parts(leaf.shape, mesh) if key in path else replicated(mesh)
    ),
    tree,
  )


def shapes(tree: Any, mesh: Mesh) -> Any:
  """Return the shapes, dtypes and shardings (by `layout`) of arrays."""
  return jax.tree.map(
    lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
    tree,
    layout(tree, mesh),
  )


def on_one_cpu(arrays: Iterable[Any]) -> bool:
  """Return whether all arrays are on a single CPU, and none is traced."""
  placed = [array for array in arrays if not isinstance(array, np.ndarray)]
  # If all arrays are NumPy's, check the device that JAX would put them on.
  return all(map(_is_on_one_cpu, placed or [jnp.zeros(())]))


def _is_on_one_cpu(array: Any) -> bool:
  if isinstance(array, jax.core.Tracer):
    return False
  sharding = array.sharding
  if isinstance(sharding, NamedSharding):
    # With explicit axes, each operation would have to name its sharding.
    if any(kind != AxisType.Auto for kind in sharding.mesh.axis_types):
      return False
  elif not isinstance(sharding, SingleDeviceSharding):
    return False
  device, *rest = sharding.device_set
  return not rest and device.platform == "cpu"


def bytes_on_a_device(tree: Any) -> int:
  """Return the bytes of arrays, or of `shapes`, on each device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def constrain(tree: Any, mesh: Mesh) -> Any:
  """Constrain the sharding of arrays to `layout`, within a program."""
  return jax.lax.with_sharding_constraint(tree, layout(tree, mesh))


def put(tree: Any, mesh: Mesh) -> Any:
  """Place arrays by `layout`; they must be global or equal on all processes."""

  def place(array: Any, target: NamedSharding) -> jax.Array:
    is_global = isinstance(array, jax.Array) and not array.is_fully_addressable
    if target.is_fully_addressable or is_global:
      return jax.device_put(array, target)
    # `device_put` would send all values to every process to compare them.
    values = np.asarray(array)
    return jax.make_array_from_callback(
      values.shape, target, lambda index: values[index]
    )

  return jax.tree.map(place, tree, layout(tree, mesh))


def put_backbone(params: Any, mesh: Mesh) -> Any:
  return put({_IN_PARTS: params}, mesh)[_IN_PARTS]


def to_host(tree: Any) -> Any:
  """Return whole arrays as NumPy arrays; all processes must take part."""

  def fetch(array: Any) -> np.ndarray:
    whole = not isinstance(array, jax.Array) or array.is_fully_replicated
    if whole or array.is_fully_addressable:
      return jax.device_get(array)
    return multihost_utils.process_allgather(array, tiled=True)

  return jax.tree.map(fetch, tree)


def require_divisible(batch_size: int, mesh: Mesh, key: str) -> None:
  if batch_size % mesh.size:
    raise ConfigError(
      f"{key} is {batch_size}, expected a multiple of {mesh.size}, the number "
      "of devices."
    )


def shard_batch(batch: Any, mesh: Mesh) -> Any:
  """Make global arrays of this process's rows; return jax arrays unchanged."""
  sharding = by_rows(mesh)

  def place(rows: np.ndarray | jax.Array) -> jax.Array:
    if isinstance(rows, jax.Array):
      return rows
    return jax.make_array_from_process_local_data(sharding, rows)

  return jax.tree.map(place, batch)


def prefetch(
  batches: Iterator[dict[str, Any]], mesh: Mesh, size: int = 2
) -> Iterator[dict[str, Any]]:
  """Send up to `size` batches to the devices before they are used."""
  queue: collections.deque[dict[str, Any]] = collections.deque()
  for batch in batches:
    queue.append(shard_batch(batch, mesh))
    if len(queue) >= size:
      yield queue.popleft()
  yield from queue

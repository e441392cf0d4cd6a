"""Tasks stacked in slots: fixed shapes, so that new tasks need no compilation.

Entries that a task does not use are zero, and masked.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp

from memory_vit.model.masks import TaskMask
from memory_vit.model.parts import PARTS, Axes, PassHooks
from memory_vit.model.rope import Rotation
from memory_vit.model.task import TaskSpec
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig


class SlotArrays(NamedTuple):
  """Tasks in slots, as a tree of arrays for the task stream."""

  # {part: stacked arrays}, see `Part.stack` and `Part.ready`. Parts that no
  # task has are left out, and compiled programs do not compute them.
  parts: dict[str, Any]
  mask: TaskMask | None  # None if all tasks have the regime "head"
  # Heads that read the backbone's pooled output, see `stack_heads`.
  heads: Tree | None = None

  @property
  def stream_mask(self) -> TaskMask:
    """`mask`, which must not be None."""
    assert self.mask is not None
    return self.mask

  def ready(self, keys_values: Callable[..., Any]) -> "SlotArrays":
    """Prepare arrays for passes; `keys_values` projects the memory cells."""
    if self.mask is None:
      return self
    parts = {
      name: PARTS[name].ready(stacked, self.mask, keys_values)
      for name, stacked in self.parts.items()
    }
    return self._replace(parts=parts)

  def hooks(
    self, config: ViTConfig, angles: Rotation | None
  ) -> list[PassHooks]:
    """Return hooks for a pass; `angles` is the rotation of backbone tokens."""
    # Follow the order of PARTS, because jax sorts the keys of `self.parts`.
    return [
      part.hooks(self.parts[name], config, angles)
      for name, part in PARTS.items()
      if name in self.parts
    ]


def exact_rooms(specs: Sequence[TaskSpec]) -> dict[str, Any]:
  """Return {part: the smallest room in which these tasks fit}."""
  rooms = {}
  for name, part in PARTS.items():
    part_specs = [spec for spec in specs if part in spec.learned.parts]
    if part_specs:
      rooms[name] = part.room(part_specs)
  return rooms


def stack_tasks(
  tasks: Mapping[int, Tree],
  mask: TaskMask,
  rooms: Mapping[str, Any],
  axes: Axes,
  *,
  xp: ModuleType = jnp,
) -> SlotArrays:
  """Stack the parameters of tasks in slots.

  Args:
    tasks: {slot: parameters of a task}; other slots are filled with zeros.
    mask: task mask of all slots.
    rooms: {part: room} of the parts to stack, see `Part.room`.
    axes: lengths of the backbone.
    xp: jax.numpy, or NumPy, which compiles nothing.
  """
  parts = {
    name: _stack(name, tasks, len(mask.cells), room, axes, xp)
    for name, room in rooms.items()
  }
  return SlotArrays(parts, mask)


def stack_heads(
  tasks: Mapping[int, Tree],
  slots: int,
  room: int,
  axes: Axes,
  *,
  xp: ModuleType = jnp,
) -> Tree:
  """Stack heads, {"kernel": (d, t, c), "bias": (t, c)}; see `stack_tasks`."""
  heads = _stack("head", tasks, slots, room, axes, xp)
  # With d first, a pass can use all kernels as one matrix without copying them.
  return {**heads, "kernel": xp.moveaxis(heads["kernel"], 0, 1)}


def _stack(
  part: str,
  tasks: Mapping[int, Tree],
  slots: int,
  room: Any,
  axes: Axes,
  xp: ModuleType,
) -> Any:
  params = {i: task[part] for i, task in tasks.items() if part in task}
  return PARTS[part].stack(params, slots, room, axes, xp)

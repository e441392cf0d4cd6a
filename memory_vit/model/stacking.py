"""Tasks stacked in slots: arrays of fixed shapes, so that no task recompiles.

What a task does not use is zero, and masked.
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

  # {part: its arrays}, see `Part.stack` and `Part.ready`. A part that no task
  # has is absent, and the program then knows nothing of it.
  parts: dict[str, Any]
  mask: TaskMask | None  # None without the task stream: all tasks are heads
  # Those on the pooled output of the backbone, see `stack_heads`.
  heads: Tree | None = None

  @property
  def stream_mask(self) -> TaskMask:
    """`mask`, of slots that have a task stream."""
    assert self.mask is not None
    return self.mask

  def ready(self, keys_values: Callable[..., Any]) -> "SlotArrays":
    """Make what a pass takes, by the backbone's keys and values of memory."""
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
    """Begin a pass; `angles` are those of the backbone's tokens."""
    # In the order of PARTS: jax sorts the keys of a dictionary.
    return [
      part.hooks(self.parts[name], config, angles)
      for name, part in PARTS.items()
      if name in self.parts
    ]


def exact_rooms(specs: Sequence[TaskSpec]) -> dict[str, Any]:
  """The smallest room for the parts of these tasks, by name."""
  rooms = {}
  for name, part in PARTS.items():
    having = [spec for spec in specs if part in spec.learned.parts]
    if having:
      rooms[name] = part.room(having)
  return rooms


def stack_tasks(
  tasks: Mapping[int, Tree],
  mask: TaskMask,
  rooms: Mapping[str, Any],
  axes: Axes,
  *,
  xp: ModuleType = jnp,
) -> SlotArrays:
  """Stack the parameters of tasks, {slot: those of a task}.

  Args:
    tasks: zeros are in all other slots.
    mask: of the slots.
    rooms: of the parts that are stacked, see `Part.room`.
    axes: of the backbone.
    xp: jax.numpy, or NumPy, with which nothing is compiled.
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
  # As a matrix (d, t c) without a copy in each pass.
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

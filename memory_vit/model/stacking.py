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
  mask: TaskMask

  def ready(self, keys_values: Callable[..., Any]) -> "SlotArrays":
    """Make what a pass takes, by the backbone's keys and values of memory."""
    return SlotArrays(
      {
        name: PARTS[name].ready(stacked, self.mask, keys_values)
        for name, stacked in self.parts.items()
      },
      self.mask,
    )

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
  """The smallest room for the parts of these masked tasks, by name."""
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
  slots = len(mask.cells)
  parts = {}
  for name, room in rooms.items():
    params = {i: task[name] for i, task in tasks.items() if name in task}
    parts[name] = PARTS[name].stack(params, slots, room, axes, xp)
  return SlotArrays(parts, mask)

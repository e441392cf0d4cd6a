"""Make tasks ready for their pass: in slots, or one that has its own."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from memory_vit.model.backbone import Backbone
from memory_vit.model.masks import task_mask
from memory_vit.model.stacking import SlotArrays, stack_heads, stack_tasks
from memory_vit.model.task import Task
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks import compose
from memory_vit.tasks.inference import memory_program
from memory_vit.tasks.room import Room


def place(
  backbone: Backbone, tasks: Mapping[int, Task], room: Room
) -> SlotArrays | Task:
  """Make tasks ready to be read, each in its slot.

  They are put there on the host, where nothing is compiled. To the bit what
  `fill_slots` makes of them, and with its programs. The shapes depend on the
  room alone.

  Args:
    backbone: of the tasks.
    tasks: {slot: task}; the other slots are empty.
    room: in which they fit.

  Returns:
    The slots; or the one task itself, where it composes with nothing.
  """
  places = sorted(tasks)
  if compose.runs_alone([tasks[place].spec for place in places]):
    return jax.device_put(tasks[places[0]])
  mask = task_mask(
    [tasks[place].spec for place in places],
    slots=room.slots,
    cells=room.cells,
    parents=room.parents,
    places=places,
  )
  empty = _empty_params(backbone.config, room)
  params: list[Tree] = [
    {**empty, **on_host(tasks[i].params)} if i in tasks else empty
    for i in range(room.slots)
  ]
  stacked = stack_tasks(params, mask, dict(room.side), xp=np)
  heads = stack_heads(params, room.slots, room.classes, xp=np)
  stacked, heads, mask = jax.device_put((stacked, heads, mask))
  cells = memory_program(
    backbone.params, stacked.memory, mask.memory_norm, config=backbone.config
  )
  return SlotArrays(
    cls=stacked.cls,
    cells=cells,
    **heads,
    mask=mask,
    norms=stacked.norms,
    layers=stacked.layers,
    side=stacked.side,
  )


def on_host(tree: Any) -> Any:
  """The same tree, of arrays of NumPy."""
  return jax.tree.map(np.asarray, tree)


def _empty_params(config: ViTConfig, room: Room) -> Tree:
  """Parameters of a task of no cells and no classes."""
  d, l = config.width, config.depth

  def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)

  empty: Tree = {
    "cls": zeros(d),
    "memory": zeros(l, 0, d),
    "head": {"kernel": zeros(d, 0), "bias": zeros(0)},
  }
  if room.norms:
    empty["norms"] = {k: zeros(2 * l + 1, d) for k in ("scale", "bias")}
  if room.layers:
    empty["layers"] = zeros(l, d)
  return empty

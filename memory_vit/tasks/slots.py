"""Tasks in slots of rounded sizes, so that programs rarely recompile."""

# Annotations stay unevaluated, so that `help` shows short names of types.
from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memory_vit.errors import TaskError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone
from memory_vit.model.masks import TaskMask, task_mask
from memory_vit.model.parts import PARTS, Axes
from memory_vit.model.parts.part import round_up
from memory_vit.model.stacking import (
  SlotArrays,
  exact_rooms,
  stack_heads,
  stack_tasks,
)
from memory_vit.model.task import Task, TaskSpec, require_backbone
from memory_vit.runtime import schema
from memory_vit.runtime.messages import name_list
from memory_vit.tasks import inference
from memory_vit.tasks.compose import TasksLike, require_fit, task_tuple


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["arrays"],
  meta_fields=["specs", "places"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared by ==
class Slots:
  """A set of tasks in slots, ready to run on a backbone; see `fill_slots`.

  Like `Task`, it is a JAX pytree; all fields but `arrays` are static.

  Attributes:
    specs: specs of the tasks.
    places: row of each task in the logits; other rows belong to empty slots.
    arrays: parameters, with the keys and values of memory.
  """

  specs: tuple[TaskSpec, ...]
  places: tuple[int, ...]
  arrays: SlotArrays

  def __repr__(self) -> str:
    if not self.specs:
      return "Slots(0 tasks)"
    values = trees.count(self.arrays)
    names = [spec.name for spec in self.specs]
    backbone = self.specs[0].backbone
    return (
      f"Slots({len(names)} tasks: {name_list(names)}; {values:,} values, on "
      f"{backbone.variant} at {backbone.image_size} px, fingerprint "
      f"{backbone.fingerprint[:12]})"
    )


def first_free(spec: TaskSpec, taken: Collection[int]) -> int:
  """Return the first free slot: 0, 1, ..., or -1, -2, ... for a head."""
  # Each of the slots 0, 1, ... has a class token. A task that is only a head on
  # the backbone's pooled output needs no class token: its slot is negative.
  slots = (~i if spec.learned.on_pooled else i for i in itertools.count())
  return next(slot for slot in slots if slot not in taken)


def suits(slot: int, spec: TaskSpec) -> bool:
  """Return whether a slot is of the type that a task needs."""
  return (slot < 0) == spec.learned.on_pooled


def in_first_slots(tasks: Iterable[Task]) -> dict[int, Task]:
  """Put tasks into the first slots, in their order."""
  by_slot: dict[int, Task] = {}
  for task in tasks:
    by_slot[first_free(task.spec, by_slot)] = task
  return by_slot


@dataclasses.dataclass(frozen=True)
class SlotSizes:
  """Sizes of slots, for which programs are compiled."""

  slots: int
  # Number of slots for heads; ignored if no task is a head.
  heads: int
  # Maximum number of tasks that one task attends to.
  parents: int
  # (name, size) of each part of a task, such as the part "head". The size is
  # what slots reserve for the part, see `Part.room`.
  rooms: tuple[tuple[str, Any], ...]

  @classmethod
  def at_least(
    cls,
    *,
    slots: int = 0,
    parents: int = 0,
    cells: int = 0,
    classes: int = 0,
    parts: Iterable[str] = (),
  ) -> SlotSizes:
    """Return minimum sizes; `holding` enlarges sizes until given tasks fit."""
    rooms = {"memory": cells, "head": classes}
    rooms |= {name: PARTS[name].room(()) for name in parts}
    return cls(slots, slots, parents, tuple(rooms.items()))

  def holding(self, tasks: Mapping[int, Task]) -> SlotSizes:
    """Return rounded sizes in which tasks fit, at least as large as `self`."""
    composing = {
      slot: task.spec
      for slot, task in tasks.items()
      if task.spec.learned.composes
    }
    specs = [*composing.values()]
    parents = max((len(spec.attends_to) for spec in specs), default=0)
    parents = max(self.parents, parents)
    rooms, needed = dict(self.rooms), exact_rooms(specs)

    slots, heads = max(composing, default=0) + 1, -min(composing, default=0)
    return SlotSizes(
      slots=round_up(max(self.slots, slots, 1)),
      heads=round_up(max(self.heads, heads, 1)),
      parents=round_up(parents) if parents else 0,
      rooms=tuple(
        (name, part.grown(rooms.get(name), needed.get(name, part.room(()))))
        for name, part in PARTS.items()
        if part.in_every or name in rooms or name in needed
      ),
    )


def fill_slots(
  backbone: Backbone,
  tasks: TasksLike,
  *,
  slots: int = 0,
  cells: int = 0,
  classes: int = 0,
) -> Slots:
  """Make tasks ready to be run many times.

  The keys and values of their memory are computed here, once. Shapes are
  rounded up to 1, 2, 4, 8, then multiples of 8 slots; multiples of 8 cells;
  multiples of 128 classes. Other tasks with the same rounded shapes need no
  recompiling, and the logits of a task in its slot are bitwise identical
  whatever the other slots hold.

  Args:
    backbone: the frozen ViT.
    tasks: a task, a sequence or generator of tasks, or {name: task}; at least
      one, and all that they attend to must be among them.
    slots: t, the minimum number of slots for heads, and for other tasks.
    cells: m, the minimum number of cells.
    classes: c, the minimum number of classes.

  Returns:
    Slots that `read` and `forward` accept in place of the tasks.

  Raises:
    TaskError: if tasks are of another backbone, or do not fit together.
  """
  tasks = task_tuple(tasks)
  if not tasks:
    raise TaskError("there is no task to fill slots with.")
  slots, cells, classes = (
    schema.whole_number(key, value, 0, TaskError)
    for key, value in (("slots", slots), ("cells", cells), ("classes", classes))
  )
  for task in tasks:
    require_backbone(task.spec, backbone.id)
  require_fit(tasks)
  by_slot = in_first_slots(tasks)
  sizes = SlotSizes.at_least(slots=slots, cells=cells, classes=classes)
  sizes = sizes.holding(by_slot)
  stacked = _stack_program(
    {slot: task.params for slot, task in by_slot.items()},
    _mask(by_slot, sizes),
    sizes,
    Axes.of(backbone.config),
  )
  return _ready(backbone, by_slot, stacked)


def place_in_slots(
  backbone: Backbone, tasks: Mapping[int, Task], sizes: SlotSizes
) -> Slots:
  """Put tasks into given slots; arrays are bitwise those of `fill_slots`.

  `tasks` is {slot: task}; `sizes` are from `SlotSizes.holding` for `tasks`.
  """
  # Stack parameters with NumPy, because stacking with JAX compiles programs.
  params = {slot: on_host(task.params) for slot, task in tasks.items()}
  axes = Axes.of(backbone.config)
  stacked = _stack(params, _mask(tasks, sizes), sizes, axes, np)
  return _ready(backbone, tasks, jax.device_put(stacked))


def on_host(tree: Any) -> Any:
  return jax.tree.map(np.asarray, tree)


def _mask(tasks: Mapping[int, Task], sizes: SlotSizes) -> TaskMask | None:
  """Return which tasks attend to which tasks.

  Return None if all tasks have the regime `head`, which has no token.
  """
  streamed = {i: task.spec for i, task in tasks.items() if i >= 0}
  if tasks and not streamed:
    return None
  return task_mask(
    [*streamed.values()],
    slots=sizes.slots,
    cells=dict(sizes.rooms)["memory"],
    parents=sizes.parents,
    places=[*streamed],
  )


def _stack(
  params: Mapping[int, trees.Tree],
  mask: TaskMask | None,
  sizes: SlotSizes,
  axes: Axes,
  xp: ModuleType = jnp,
) -> SlotArrays:
  streamed = {i: task for i, task in params.items() if i >= 0}
  heads = {~i: task for i, task in params.items() if i < 0}
  rooms, arrays = dict(sizes.rooms), SlotArrays({}, mask)
  if mask is not None:
    arrays = stack_tasks(streamed, mask, rooms, axes, xp=xp)
  if not heads:
    return arrays
  room = rooms["head"]
  stacked = stack_heads(heads, sizes.heads, room, axes, xp=xp)
  return arrays._replace(heads=stacked)


# Stacking is one compiled program: otherwise JAX would compile a program for
# each operation.
_stack_program = jax.jit(_stack, static_argnums=(2, 3))


def _ready(
  backbone: Backbone, tasks: Mapping[int, Task], stacked: SlotArrays
) -> Slots:
  arrays = stacked.ready(
    functools.partial(
      inference.memory_program, backbone.params, config=backbone.config
    )
  )
  streamed = 0 if arrays.mask is None else len(arrays.mask.cells)
  return Slots(
    specs=tuple(task.spec for task in tasks.values()),
    places=tuple(i if i >= 0 else streamed + ~i for i in tasks),
    arrays=arrays,
  )

"""Tasks in slots: sizes are rounded up, so that programs compile rarely."""

# As text, `help` shows types by their short names.
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
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
from memory_vit.model.stacking import SlotArrays, exact_rooms, stack_tasks
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
@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Slots:
  """A set of tasks in slots, ready to run on a backbone; see `fill_slots`.

  It is a tree of arrays for JAX, as `Task` is: the rest is static.

  Attributes:
    specs: of the tasks.
    places: the slot of each, ascending; the other slots are empty.
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


@dataclasses.dataclass(frozen=True)
class SlotSizes:
  """Sizes of slots, for which programs are compiled."""

  slots: int
  # Tasks that one task attends to.
  parents: int
  # (part, the room that it has in the slots), see `Part.room`
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
    """Sizes that hold no task yet: see `holding`."""
    rooms = {"memory": cells, "head": classes}
    rooms |= {name: PARTS[name].room(()) for name in parts}
    return cls(slots, parents, tuple(rooms.items()))

  def holding(self, specs: Iterable[TaskSpec]) -> SlotSizes:
    """The same sizes, or larger ones in which these tasks fit, rounded up."""
    specs = [spec for spec in specs if spec.learned.composes]
    parents = max((len(spec.attends_to) for spec in specs), default=0)
    parents = max(self.parents, parents)
    rooms, needed = dict(self.rooms), exact_rooms(specs)
    return SlotSizes(
      slots=round_up(max(self.slots, len(specs), 1)),
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
  multiples of 128 classes. While these stay the same, other tasks compile
  nothing, and the logits of a task in its slot are bitwise identical whatever
  the other slots hold.

  Args:
    backbone: the frozen ViT.
    tasks: a task, a sequence or generator of tasks, or {name: task}; at least
      one, and all that they attend to must be among them.
    slots: t, at least.
    cells: m, at least.
    classes: c, at least.

  Returns:
    What `read` and `forward` take in place of the tasks.

  Raises:
    TaskError: for tasks of another backbone, or that do not fit together.
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
  specs = tuple(task.spec for task in tasks)
  sizes = SlotSizes.at_least(slots=slots, cells=cells, classes=classes)
  sizes = sizes.holding(specs)
  places = tuple(range(len(specs)))
  stacked = _stack_program(
    {i: task.params for i, task in enumerate(tasks)},
    _mask(specs, sizes, places),
    sizes,
    Axes.of(backbone.config),
  )
  return Slots(specs, places, _ready(backbone, stacked))


def place_in_slots(
  backbone: Backbone, tasks: Mapping[int, Task], sizes: SlotSizes
) -> Slots:
  """`fill_slots` into slots {i: task}, i ascending; bitwise identical.

  `sizes` are those of `SlotSizes.holding` for these tasks.
  """
  # Stacked on the host, where nothing is compiled.
  specs = tuple(task.spec for task in tasks.values())
  params = {i: on_host(task.params) for i, task in tasks.items()}
  mask = _mask(specs, sizes, tuple(tasks))
  axes = Axes.of(backbone.config)
  stacked = jax.device_put(_stack(params, mask, sizes, axes, np))
  return Slots(specs, tuple(tasks), _ready(backbone, stacked))


def on_host(tree: Any) -> Any:
  return jax.tree.map(np.asarray, tree)


def _mask(
  specs: Sequence[TaskSpec], sizes: SlotSizes, places: Sequence[int]
) -> TaskMask:
  return task_mask(
    specs,
    slots=sizes.slots,
    cells=dict(sizes.rooms)["memory"],
    parents=sizes.parents,
    places=places,
  )


def _stack(
  params: Mapping[int, trees.Tree],
  mask: TaskMask,
  sizes: SlotSizes,
  axes: Axes,
  xp: ModuleType = jnp,
) -> SlotArrays:
  return stack_tasks(params, mask, dict(sizes.rooms), axes, xp=xp)


# In one program, and not one for each operation.
_stack_program = jax.jit(_stack, static_argnums=(2, 3))


def _ready(backbone: Backbone, stacked: SlotArrays) -> SlotArrays:
  return stacked.ready(
    functools.partial(
      inference.memory_program, backbone.params, config=backbone.config
    )
  )

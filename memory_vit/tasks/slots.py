"""Tasks in slots: sizes are rounded up, so that programs compile rarely."""

# As text, `help` shows types by their short names.
from __future__ import annotations

import collections
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
from memory_vit.model.regimes import SideKind
from memory_vit.model.stacking import (
  SlotArrays,
  StackedTasks,
  round_up_to,
  stack_heads,
  stack_tasks,
)
from memory_vit.model.task import Task, TaskSpec, require_backbone
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig
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

  slots: int = 0
  # Of the longest memory.
  cells: int = 0
  # Of the widest head.
  classes: int = 0
  # Tasks that one task attends to.
  parents: int = 0
  # Whether tasks may have LayerNorms of their own, and read all layers.
  norms: bool = False
  layers: bool = False
  # Kinds of side streams, and the number of each.
  side: tuple[tuple[SideKind, int], ...] = ()

  def holding(self, specs: Sequence[TaskSpec]) -> SlotSizes:
    """The same sizes, or larger ones in which these tasks fit, rounded up."""
    specs = [spec for spec in specs if spec.learned.composes]
    parents = max((len(spec.attends_to) for spec in specs), default=0)
    parents = max(self.parents, parents)
    parts = {part for spec in specs for part in spec.learned.trained}
    cells = max(self.cells, 1, *(spec.cells for spec in specs))
    classes = max(self.classes, 1, *(spec.num_classes for spec in specs))
    return SlotSizes(
      slots=round_up(max(self.slots, len(specs), 1)),
      cells=round_up_to(cells, 8),
      classes=round_up_to(classes, 128),
      parents=round_up(parents) if parents else 0,
      norms=self.norms or "norms" in parts,
      layers=self.layers or "layers" in parts,
      side=_with_streams(self.side, specs),
    )


def _with_streams(
  sizes: Iterable[tuple[SideKind, int]], specs: Sequence[TaskSpec]
) -> tuple[tuple[SideKind, int], ...]:
  """Counts of side streams in which those of tasks fit, rounded up as slots."""
  counts = collections.Counter(s.side for s in specs if s.learned.has_side)
  most = dict(sizes)
  for kind, count in counts.items():
    most[kind] = max(most.get(kind, 0), round_up(count))
  return tuple(sorted(most.items()))


def round_up(count: int) -> int:
  """1, 2, 4, 8, then multiples of 8: never more than 7 are unused."""
  return 1 << (count - 1).bit_length() if count <= 8 else round_up_to(count, 8)


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
  sizes = SlotSizes(slots=slots, cells=cells).holding(specs)
  stacked = _stack_program(
    [task.params for task in tasks],
    task_mask(
      specs, slots=sizes.slots, cells=sizes.cells, parents=sizes.parents
    ),
    classes,
    sizes.side,
  )
  return Slots(specs, tuple(range(len(specs))), _with_cells(backbone, *stacked))


def place_in_slots(
  backbone: Backbone, tasks: Mapping[int, Task], sizes: SlotSizes
) -> Slots:
  """`fill_slots` into slots {i: task}, i ascending; bitwise identical."""
  # Stacked on the host, where nothing is compiled.
  specs = tuple(task.spec for task in tasks.values())
  mask = task_mask(
    specs,
    slots=sizes.slots,
    cells=sizes.cells,
    parents=sizes.parents,
    places=tuple(tasks),
  )
  empty = _empty_params(backbone.config, sizes)
  params = [
    {**empty, **on_host(tasks[i].params)} if i in tasks else empty
    for i in range(sizes.slots)
  ]
  stacked = jax.device_put(_stack(params, mask, sizes.classes, sizes.side, np))
  return Slots(specs, tuple(tasks), _with_cells(backbone, *stacked))


def on_host(tree: Any) -> Any:
  return jax.tree.map(np.asarray, tree)


def _stack(
  params: Sequence[Tree],
  mask: TaskMask,
  classes: int,
  side: tuple[tuple[SideKind, int], ...],
  xp: ModuleType = jnp,
) -> tuple[StackedTasks, Tree]:
  stacked = stack_tasks(params, mask, dict(side), xp=xp)
  return stacked, stack_heads(params, len(stacked.cls), classes, xp=xp)


# In one program, and not one for each operation.
_stack_program = jax.jit(_stack, static_argnums=(2, 3))


def _with_cells(
  backbone: Backbone, stacked: StackedTasks, heads: Tree
) -> SlotArrays:
  cells = inference.memory_program(
    backbone.params,
    stacked.memory,
    stacked.mask.memory_norm,
    config=backbone.config,
  )
  return stacked.with_cells(cells, heads)


def _empty_params(config: ViTConfig, sizes: SlotSizes) -> Tree:
  """Parameters of a task of no cells and no classes."""
  d, l = config.width, config.depth

  def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)

  empty: Tree = {
    "cls": zeros(d),
    "memory": zeros(l, 0, d),
    "head": {"kernel": zeros(d, 0), "bias": zeros(0)},
  }
  if sizes.norms:
    empty["norms"] = {k: zeros(2 * l + 1, d) for k in ("scale", "bias")}
  if sizes.layers:
    empty["layers"] = zeros(l, d)
  return empty

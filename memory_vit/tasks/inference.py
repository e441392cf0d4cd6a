"""Compiled programs of a forward pass, and tasks in slots for them.

`encode_program` is one executable for a backbone, whatever the tasks are: that
is why the original outputs stay bitwise identical. `read_program` is small, and
holds all that depends on the tasks.
"""

# As text, `help` shows types by their short names.
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from memory_vit.errors import TaskError
from memory_vit.model.backbone import Backbone
from memory_vit.model.context import Cells, Context
from memory_vit.model.masks import TaskMask, task_mask
from memory_vit.model.regimes import SideKind
from memory_vit.model.stacking import (
  SlotArrays,
  StackedTasks,
  stack_heads,
  stack_tasks,
)
from memory_vit.model.task import Task, TaskSpec, require_backbone
from memory_vit.model.trees import Tree
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.compose import TasksLike, require_fit, task_tuple
from memory_vit.tasks.pieces import ImageProgram
from memory_vit.tasks.slots import Slots, SlotSizes


@ImageProgram
def encode_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> tuple[Float32[Array, "b c0"], Context]:
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="encode")


@ImageProgram
def plain_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> Float32[Array, "b c0"]:
  """The original outputs alone: XLA leaves out what tasks would use."""
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="encode")[0]


@ImageProgram
def summary_program(
  params: Any, images: Float[Array, "b side side 3"], *, config: ViTConfig
) -> Float32[Array, "b n d"]:
  model = MemoryViT(config)
  return apply(model, {"backbone": params}, images, method="summarize")


def read_tasks(
  task_params: Any,
  backbone_params: Any,
  context: Context,
  *,
  config: ViTConfig,
  specs: tuple[TaskSpec, ...],
) -> dict[str, Float32[Array, "b _"]]:
  """`MemoryViT.read`, which training differentiates by `task_params`."""
  params = {"backbone": backbone_params, "tasks": task_params}
  model = MemoryViT(config, specs)
  return apply(model, params, context, method="read")


@functools.partial(jax.jit, static_argnames="config")
def read_program(
  backbone_params: Any,
  slots: SlotArrays,
  context: Context,
  *,
  config: ViTConfig,
) -> Float32[Array, "b t c"]:
  """`MemoryViT.read_slots`; compiled once for all tasks that fit the slots."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  return apply(model, params, slots, context, method="read_slots")


@functools.partial(jax.jit, static_argnames="config")
def memory_program(
  backbone_params: Any,
  memory: Float[Array, "l t m d"],
  norm: Bool[Array, " t"],
  *,
  config: ViTConfig,
) -> Cells:
  """Keys and values of memory, the same for all images."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  return apply(model, params, memory, norm, method="keys_values")


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


def place(
  backbone: Backbone, tasks: Mapping[int, Task], sizes: SlotSizes
) -> Slots:
  """`fill_slots` into given slots and sizes, bitwise identical."""
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
  cells = memory_program(
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

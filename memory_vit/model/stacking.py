"""Tasks stacked in slots: arrays of fixed shapes, so that no task recompiles.

The number of slots, the longest memory and the greatest numbers of classes and
parents are rounded up, and what is not used is masked.
"""

import types
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Shaped

from memory_vit.model.context import Cells
from memory_vit.model.masks import TaskMask
from memory_vit.model.regimes import SideKind
from memory_vit.model.side import SideGroup, group_streams
from memory_vit.model.trees import AnyArray, Tree


class SlotArrays(NamedTuple):
  """Tasks in slots, as a tree of arrays for the task stream."""

  cls: Float[AnyArray, "t d"]
  cells: Cells
  mask: TaskMask
  # Added to the 2 l + 1 LayerNorms, {"scale", "bias"} of (2 l + 1, t, d) each;
  # None if no task has any, and the program then knows nothing of them.
  norms: Tree | None
  # Weights of the tokens after each block; None likewise.
  layers: Float[AnyArray, "l t d"] | None
  # Side streams in groups of their own slots; empty likewise.
  side: dict[str, SideGroup]
  # From `stack_heads`; empty if features alone are asked for.
  heads: Tree


class StackedTasks(NamedTuple):
  """Parameters of tasks side by side, zeros where a slot or cell is empty."""

  cls: Float[AnyArray, "t d"]
  memory: Float[AnyArray, "l t m d"]
  mask: TaskMask
  norms: Tree | None
  layers: Float[AnyArray, "l t d"] | None
  side: dict[str, SideGroup]

  def with_cells(self, cells: Cells, heads: Tree) -> SlotArrays:
    """The slots, with keys and values of their memory."""
    return SlotArrays(
      self.cls, cells, self.mask, self.norms, self.layers, self.side, heads
    )


def stack_tasks(
  tasks: Sequence[Tree],
  mask: TaskMask,
  side: Mapping[SideKind, int] = types.MappingProxyType({}),
  *,
  xp: ModuleType = jnp,
) -> StackedTasks:
  """Stack parameters of tasks, but their heads; with NumPy nothing compiles."""
  slots, cells = mask.cells.shape
  l, _, d = tasks[0]["memory"].shape
  memory = [_pad(task["memory"], (l, cells, d), xp) for task in tasks]
  return StackedTasks(
    cls=_stack([task["cls"] for task in tasks], slots, xp),
    memory=_stack(memory, slots, xp, axis=1),
    mask=mask,
    norms=_stack_part("norms", tasks, slots, xp),
    layers=_stack_part("layers", tasks, slots, xp),
    side=group_streams(tasks, slots, side, xp=xp),
  )


def _stack_part(
  part: str, tasks: Sequence[Tree], slots: int, xp: ModuleType
) -> Any:
  """Stack a part that not all tasks have, along its second axis."""
  known = [task[part] for task in tasks if part in task]
  if not known:
    return None
  none = jax.tree.map(xp.zeros_like, known[0])
  return _stack([task.get(part, none) for task in tasks], slots, xp, axis=1)


def stack_heads(
  tasks: Sequence[Tree],
  slots: int,
  classes: int = 0,
  *,
  xp: ModuleType = jnp,
) -> Tree:
  """Kernels (t, d, c) and biases (t, c), padded with zeros; c is rounded up."""
  heads = [task["head"] for task in tasks]
  d = heads[0]["kernel"].shape[0]
  c = round_up_to(max(classes, *(head["bias"].shape[0] for head in heads)), 128)
  shapes = {"kernel": (d, c), "bias": (c,)}
  padded = [{k: _pad(head[k], shapes[k], xp) for k in shapes} for head in heads]
  return _stack(padded, slots, xp)


def round_up_to(count: int, unit: int) -> int:
  return -(-count // unit) * unit


def _pad(
  array: Shaped[AnyArray, "..."], shape: tuple[int, ...], xp: ModuleType
) -> Shaped[AnyArray, "..."]:
  """Add zeros at the end of every axis, up to `shape`."""
  widths = [(0, n - old) for old, n in zip(array.shape, shape, strict=True)]
  return xp.pad(array, widths)


def _stack(
  each: Sequence[Any], slots: int, xp: ModuleType, axis: int = 0
) -> Any:
  """Stack trees of arrays along a new axis, zeros in empty slots."""
  none = jax.tree.map(xp.zeros_like, each[0])
  each = [*each, *[none] * (slots - len(each))]
  return jax.tree.map(lambda *arrays: xp.stack(arrays, axis), *each)

"""Tasks as arrays of fixed shapes, ready to be served.

A program is compiled for shapes. Tasks that come and go would change them each
time, so tasks lie in slots: the number of slots, the longest memory and the
greatest number of classes and parents are rounded up, and what is not used is
masked. The sixth task in a model of eight slots runs the program that is there.
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
  """Tasks in slots, as a tree of arrays for the task stream.

  Attributes:
    cls: class tokens.
    cells: keys and values of memory. They depend on no image, and are computed
      once.
    mask: who sees whom.
    norms: what tasks add to the 2 l + 1 LayerNorms, {"scale", "bias"} of
      (2 l + 1, t, d) each; None if no task has any, and the program then knows
      nothing of them.
    layers: weights with which tasks read their token after each block; None
      likewise.
    side: side streams in groups of their own slots, see `side.group_streams`;
      empty likewise.
    heads: from `stack_heads`; empty if features alone are read.
  """

  cls: Float[AnyArray, "t d"]
  cells: Cells
  mask: TaskMask
  norms: Tree | None
  layers: Float[AnyArray, "l t d"] | None
  side: dict[str, SideGroup]
  heads: Tree


class StackedTasks(NamedTuple):
  """Parameters of tasks side by side, zeros where a slot or cell is empty.

  Attributes as of `SlotArrays`, but `memory` of all layers.
  """

  cls: Float[AnyArray, "t d"]
  memory: Float[AnyArray, "l t m d"]
  mask: TaskMask
  norms: Tree | None
  layers: Float[AnyArray, "l t d"] | None
  side: dict[str, SideGroup]

  def with_cells(self, cells: Cells, heads: Tree) -> SlotArrays:
    """What the task stream runs on; `cells` are of the memory."""
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
  """Stack what the task stream computes with, heads excepted.

  Args:
    tasks: parameters of at least one task.
    mask: of these tasks; it says how many slots and cells there are.
    side: {kind of side stream: how many there are, at least}.
    xp: `numpy` stacks on the host, where nothing is compiled.
  """
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
  """Kernels (t, d, c) and biases (t, c), with zeros where nothing is.

  c is the greatest number of classes, or `classes` where that is more, rounded
  up.
  """
  heads = [task["head"] for task in tasks]
  d = heads[0]["kernel"].shape[0]
  c = round_up_to(max(classes, *(head["bias"].shape[0] for head in heads)), 128)
  shapes = {"kernel": (d, c), "bias": (c,)}
  padded = [{k: _pad(head[k], shapes[k], xp) for k in shapes} for head in heads]
  return _stack(padded, slots, xp)


def round_up_to(count: int, unit: int) -> int:
  """The next multiple of `unit`."""
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

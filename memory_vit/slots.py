"""Tasks as arrays of fixed shapes, ready to be served.

A program is compiled for shapes. Tasks that come and go would change them each
time, so tasks lie in slots: the number of slots, the longest memory and the
greatest number of classes and parents are rounded up, and what is not used is
masked. The sixth task in a model of eight slots runs the program that is there.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memory_vit import trees
from memory_vit.encoder import Context
from memory_vit.tasks import Task, TaskSpec, View, listed, view_of
from memory_vit.trees import Tree


class SlotArrays(NamedTuple):
  """What the task stream computes with; a tree of arrays.

  Attributes:
    cls: (t, d) class tokens.
    cells: keys and values of memory, of every layer (t, h, m, k) each. They
      depend on no picture, and are computed once.
    kernel: (t, d, c) of the heads.
    bias: (t, c).
    view: who sees whom.
    norms: what tasks add to the LayerNorms, see `encoder.Encoder`; None where
      no task has any, and the program then knows nothing of them.
  """

  cls: jax.Array
  cells: Context
  kernel: jax.Array
  bias: jax.Array
  view: View
  norms: Tree | None


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["arrays"],
  meta_fields=["specs"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Slots:
  """A set of tasks that is ready for a backbone; see `programs.fill_slots`.

  It is a tree of arrays for JAX, as `Task` is: `specs` are static.

  Attributes:
    specs: number i is the task in slot i; the other slots are empty.
    arrays: see `SlotArrays`.
  """

  specs: tuple[TaskSpec, ...]
  arrays: SlotArrays

  def __repr__(self) -> str:
    values = trees.count(self.arrays)
    names = [spec.name for spec in self.specs]
    backbone = self.specs[0].backbone
    return (
      f"Slots({len(names)} tasks: {listed(names)}; {values:,} values, on "
      f"{backbone.variant} at {backbone.image_size} px, fingerprint "
      f"{backbone.fingerprint[:12]})"
    )


def slot_view(
  specs: Sequence[TaskSpec], slots: int = 0, cells: int = 0
) -> View:
  """The `View` of tasks in slots: sizes are rounded up.

  Args:
    specs: the tasks, at least one.
    slots: t, at least.
    cells: m, at least.
  """
  parents = max(len(spec.attends_to) for spec in specs)
  return view_of(
    specs,
    slots=_rounded_up(max(slots, len(specs))),
    cells=_multiple(max(cells, 1, *(spec.cells for spec in specs)), 8),
    parents=_rounded_up(parents) if parents else 0,
  )


def stack_memory(
  memory: Sequence[jax.Array], slots: int, cells: int
) -> jax.Array:
  """(l, m, d) of every task -> (l, t, m, d), with zeros where nothing is."""
  l, _, d = memory[0].shape
  padded = [_pad(one, (l, cells, d)) for one in memory]
  return jnp.stack(_fill(padded, slots), axis=1)


def stack_classes(classes: Sequence[jax.Array], slots: int) -> jax.Array:
  """(d,) of every task -> (t, d), with zeros where a slot is empty."""
  return jnp.stack(_fill(list(classes), slots))


def stack_norms(tasks: Sequence[Tree], slots: int) -> Tree | None:
  """{"scale", "bias"} of (2 l + 1, t, d), zeros for tasks that have none.

  Args:
    tasks: parameters of tasks.
    slots: t.

  Returns:
    None where no task has any.
  """
  known = [task["norms"] for task in tasks if "norms" in task]
  if not known:
    return None
  none = jax.tree.map(jnp.zeros_like, known[0])
  each = _fill([task.get("norms", none) for task in tasks], slots)
  return jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=1), *each)


def stack_heads(
  tasks: Sequence[Task], slots: int
) -> tuple[jax.Array, jax.Array]:
  """Kernels (t, d, c) and biases (t, c), with zeros where nothing is."""
  c = _multiple(max(task.spec.num_classes for task in tasks), 128)
  heads = [task.params["head"] for task in tasks]
  kernels = [_pad(h["kernel"], (h["kernel"].shape[0], c)) for h in heads]
  biases = [_pad(h["bias"], (c,)) for h in heads]
  return jnp.stack(_fill(kernels, slots)), jnp.stack(_fill(biases, slots))


def _rounded_up(count: int) -> int:
  """1, 2, 4, 8, then multiples of 8: never more than 7 for nothing."""
  return 1 << (count - 1).bit_length() if count <= 8 else _multiple(count, 8)


def _multiple(count: int, unit: int) -> int:
  """The next multiple of `unit`."""
  return -(-count // unit) * unit


def _pad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Adds zeros at the end of every axis, up to `shape`."""
  widths = [(0, n - old) for old, n in zip(array.shape, shape, strict=True)]
  return jnp.pad(array, widths)


def _fill(each: list[Any], slots: int) -> list[Any]:
  """Adds zeros for empty slots."""
  none = jax.tree.map(jnp.zeros_like, each[0])
  return each + [none] * (slots - len(each))

"""Tasks as arrays of fixed shapes, ready to be served.

A program is compiled for shapes. Tasks that come and go would change them each
time, so tasks lie in slots: the number of slots, the longest memory and the
greatest number of classes and parents are rounded up, and what is not used is
masked. The sixth task in a model of eight slots runs the program that is there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memory_vit.model.encoder import Context
from memory_vit.model.masks import TaskMask
from memory_vit.model.task import Task
from memory_vit.model.trees import Tree


class SlotArrays(NamedTuple):
  """What the task stream computes with; a tree of arrays.

  Attributes:
    cls: (t, d) class tokens.
    cells: keys and values of memory, of every layer (t, h, m, k) each. They
      depend on no picture, and are computed once.
    kernel: (t, d, c) of the heads.
    bias: (t, c).
    mask: who sees whom.
    norms: what tasks add to the LayerNorms, see `encoder.Encoder`; None where
      no task has any, and the program then knows nothing of them.
  """

  cls: jax.Array
  cells: Context
  kernel: jax.Array
  bias: jax.Array
  mask: TaskMask
  norms: Tree | None


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
  c = round_up_to(max(task.spec.num_classes for task in tasks), 128)
  heads = [task.params["head"] for task in tasks]
  kernels = [_pad(h["kernel"], (h["kernel"].shape[0], c)) for h in heads]
  biases = [_pad(h["bias"], (c,)) for h in heads]
  return jnp.stack(_fill(kernels, slots)), jnp.stack(_fill(biases, slots))


def round_up_to(count: int, unit: int) -> int:
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

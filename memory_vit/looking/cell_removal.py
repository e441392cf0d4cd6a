"""Ablation of memory cells: the accuracy of a task without some of them.

A removed cell is masked out of the softmax. A cell of zeros would still have a
key and receive attention.
"""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Float64, Int, Int8, Int32, Int64
from scipy import special

from memory_vit.data import batching
from memory_vit.data.split import Split
from memory_vit.errors import DataError, TaskError
from memory_vit.evaluation import task_data
from memory_vit.kinds import class_sums
from memory_vit.model.backbone import Backbone
from memory_vit.model.context import Context
from memory_vit.model.parts.head import head_logits
from memory_vit.model.stacking import SlotArrays
from memory_vit.model.task import Task, TaskSpec
from memory_vit.model.trees import AnyArray, Tree
from memory_vit.model.vit import MemoryViT, apply
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import sharding
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.tasks import compose
from memory_vit.tasks.program import encode
from memory_vit.tasks.slots import fill_slots

# Family-wise significance level for all removals of memory from a task.
_LEVEL = 0.05
# Maximum number of variants of a task; each lacks different memory cells.
# A task with 24 layers of 128 cells has 3,097 variants.
_MOST_VARIANTS = 4_096
# Maximum number of variants of a task that run together. With this limit, and 8
# images on a CPU, XLA's temporary buffers take 6 MiB of RAM (B/16, 5 cells) or
# 52 MiB (B/32, 64 cells, and the task attends to another task). In comparison,
# the keys and values of the images take 111 MiB (B/16) or 28 MiB (B/32).
_TOGETHER = 32


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class Removals:
  """Effects of removing one cell, all cells of a layer, or the whole memory.

  Attributes:
    lost: number of examples that are right before the removal, then wrong.
    gained: number of examples that are wrong before the removal, then right.
    examples: number of all examples.
  """

  lost: Int64[np.ndarray, "*which"]
  gained: Int64[np.ndarray, "*which"]
  examples: int

  @property
  def difference(self) -> Float64[np.ndarray, "*which"]:
    """Top-1 after the removal minus top-1 with all memory."""
    return np.asarray((self.gained - self.lost) / self.examples)

  @property
  def standard_error(self) -> Float64[np.ndarray, "*which"]:
    """Standard error of the difference, paired over the examples.

    It is far below the standard error for two independent accuracies, because
    examples that are right in both cases, or wrong in both, do not contribute.
    """
    changed = self.gained + self.lost
    spread = changed - (self.gained - self.lost) ** 2 / self.examples
    return np.asarray(np.sqrt(spread) / self.examples)

  @property
  def p_value(self) -> Float64[np.ndarray, "*which"]:
    """p-values of McNemar's exact test, two-sided."""
    fewer = np.minimum(self.gained, self.lost)
    tail = special.bdtr(fewer, self.gained + self.lost, 0.5)
    return np.asarray(np.minimum(1.0, 2 * tail))


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class CellRemoval:
  """The accuracy of a task without parts of its memory.

  Attributes:
    task: name of the task.
    data: readable name of the data set, such as "digits" or "folder pets".
    split: split of the data set.
    examples: number of evaluated examples.
    skipped: number of unreadable examples, which do not count.
    top1: accuracy with all memory.
    cells: (l, m), removals of one cell of one layer.
    layers: (l,), removals of all cells of one layer.
    memory: (), removal of all cells of the task.
  """

  task: str
  data: str
  split: str
  examples: int
  skipped: int
  top1: float
  cells: Removals
  layers: Removals
  memory: Removals

  def significant(self, removals: Removals) -> Bool[np.ndarray, "*which"]:
    """Return which of these removals of the task are significant.

    Their p-values are below 0.05 divided by the number of the task's removals
    (Bonferroni). If memory has no effect, the probability of any significant
    removal is at most 5 %.
    """
    parts = (self.cells, self.layers, self.memory)
    count = sum(part.lost.size for part in parts)
    return np.asarray(removals.p_value < _LEVEL / count)


def remove_cells(
  backbone: Backbone,
  tasks: compose.TasksLike,
  source: Split,
  names: str | Iterable[str] | None = None,
  *,
  batch_size: int = 256,
  mesh: Mesh | None = None,
) -> dict[str, CellRemoval]:
  """Run an ablation of memory cells: evaluate tasks without each cell.

  The backbone runs once for each batch. Only 32 variants of a task run at a
  time, so that device memory does not grow with the number of cells.

  Args:
    backbone: the backbone of all tasks, on the devices of the mesh.
    tasks: all tasks of a model: a task, a sequence or generator of tasks, or
      {name: task}. They include the tasks that evaluated tasks attend to, whose
      memory is not removed.
    source: the examples, with the classes of the evaluated tasks.
    names: name or names of the tasks to evaluate; by default, all tasks of
      classes that have memory.
    batch_size: images in a batch of all processes together, a multiple of the
      number of devices.
    mesh: devices over which batches are split; by default all devices.

  Returns:
    {task name: its ablation}.

  Raises:
    TaskError: for a task of labels or values, without memory or with too many
      cells, with other classes than the examples, or with outputs that are not
      finite; for tasks that do not fit together; or without a task to evaluate.
    ConfigError: if batch_size is not a multiple of the number of devices.
    DataError: if there is no readable example.
  """
  mesh = sharding.make_mesh() if mesh is None else mesh
  sharding.require_divisible(batch_size, mesh, "batch_size")
  # Require that all tasks use the same preprocessing: they share the batches.
  tasks = compose.concatenate(tasks)
  if names is None:
    names = [task.name for task in tasks if can_remove(task.spec)]
  else:
    names = [names] if isinstance(names, str) else list(names)
  if not names:
    raise TaskError(
      "no task of classes has memory cells that could be removed."
    )
  for name in names:
    _require_classes(compose.with_parents(tasks, name)[0], source)
  if not source.size:
    raise DataError(f"the data set {source.full_name!r} has no example.")
  ablations = {name: _Ablation(backbone, tasks, name, mesh) for name in names}
  counts: dict[str, np.ndarray] = {}
  batches = batching.eval_batches(
    source, tasks[0].spec.preprocessing, batch_size=batch_size
  )
  title = f"removing cells, {source.full_name} {source.split}"
  with ProgressBar(title, source.size) as bar:
    for batch in sharding.prefetch(batches, mesh):
      _, context = encode(backbone, batch["image"], check=False)
      for name, ablation in ablations.items():
        changes = ablation.count(context, batch["label"], batch["mask"])
        counts[name] = counts.get(name, 0) + changes
      bar.update(len(batch["mask"]))
  return {name: ablations[name].removal(counts[name], source) for name in names}


def _require_classes(task: Task, source: Split) -> None:
  """Raise if the classes of the task and of the data set differ.

  If the task has no class names, only the numbers of classes are compared.
  """
  if task.spec.class_names or task.spec.num_classes != source.num_classes:
    task_data.require_classes(task, source)


class _Ablation:
  """Ablation of a task: evaluates the task with and without parts of memory."""

  def __init__(
    self, backbone: Backbone, tasks: Sequence[Task], name: str, mesh: Mesh
  ) -> None:
    family = [
      dataclasses.replace(task, params=sharding.put(task.params, mesh))
      for task in compose.with_parents(tasks, name)
    ]
    self._task, self._backbone = family[0], backbone
    require_removable(backbone, self._task)
    self._slots = fill_slots(backbone, family).arrays
    self._program = _count_program(
      sharding.replicated(mesh), backbone.config, self._task.spec.cells
    )

  def count(
    self,
    context: Context,
    labels: Int[Array, " b"],
    mask: Float32[Array, " b"],
  ) -> Int64[np.ndarray, "4 v"]:
    """Return `count_changes` of a batch; raise if outputs are not finite."""
    counts = np.asarray(
      self._program(
        self._backbone.params,
        self._slots,
        self._task.params["head"],
        context,
        labels,
        mask,
      )
    )
    if counts[4].any():
      raise TaskError(f"outputs of task {self._task.name!r} are not finite.")
    return counts[:4].astype(np.int64)

  def removal(
    self, counts: Int64[np.ndarray, "4 v"], source: Split
  ) -> CellRemoval:
    depth, cells = self._backbone.config.depth, self._task.spec.cells
    examples, right = map(int, counts[:2, 0])
    if not examples:
      raise DataError(
        f"no example of the data set {source.full_name!r} could be read."
      )
    lost, gained = counts[2:]

    def part(start: int, *shape: int) -> Removals:
      which = slice(start, start + math.prod(shape))
      return Removals(
        lost[which].reshape(shape), gained[which].reshape(shape), examples
      )

    return CellRemoval(
      task=self._task.name,
      data=source.full_name,
      split=source.split,
      examples=examples,
      skipped=source.size - examples,
      top1=right / examples,
      cells=part(0, depth, cells),
      layers=part(depth * cells, depth),
      memory=part(depth * (cells + 1)),
    )


def variant_masks(depth: int, cells: int) -> Bool[np.ndarray, "v l m"]:
  """Return which cells each variant of a task keeps.

  With l = `depth` and m = `cells`, the v = l m + l + 1 variants lack, in this
  order: one cell, layer by layer; all cells of one layer; all cells.
  """
  single = ~np.eye(depth * cells, dtype=bool).reshape(-1, depth, cells)
  layer = ~np.eye(depth, dtype=bool)[:, :, None].repeat(cells, axis=2)
  none = np.zeros((1, depth, cells), bool)
  return np.concatenate([single, layer, none])


def can_remove(spec: TaskSpec) -> bool:
  """Return whether a task has memory cells and predicts classes."""
  return spec.cells > 0 and spec.kind.kind.one_is_right


def require_removable(backbone: Backbone, task: Task) -> None:
  """Raise unless a task predicts classes and has cells, but not too many."""
  depth, cells = backbone.config.depth, task.spec.cells
  if not task.spec.kind.kind.one_is_right:
    raise TaskError(
      f"task {task.name!r} predicts {task.spec.kind.name}: expected a task of "
      "classes, because the effect of a removal is measured as accuracy."
    )
  if not cells:
    raise TaskError(
      f"task {task.name!r} has no memory cells that could be removed."
    )
  variants = depth * cells + depth + 1
  if variants > _MOST_VARIANTS:
    raise TaskError(
      f"task {task.name!r} has {cells:,} memory cells in each of {depth} "
      f"layers: removing one cell at a time takes {variants:,} evaluations, "
      f"expected at most {_MOST_VARIANTS:,}. Leave the task out."
    )


def logits_without(
  params: Tree,
  slots: SlotArrays,
  head: Tree,
  seen: Bool[AnyArray, "l m"],
  context: Context,
  *,
  config: ViTConfig,
) -> Float32[Array, "b c"]:
  """Return logits of the task in slot 0, with only its memory cells in `seen`.

  The other slots hold the tasks that this task attends to, with all cells.
  """
  every = jnp.ones((config.depth, *slots.stream_mask.cells.shape), bool)
  features = apply(
    MemoryViT(config), {"backbone": params}, slots, context,
    every.at[:, 0, : seen.shape[1]].set(seen), method="slot_features",
  )  # fmt: skip
  return head_logits(features[:, 0], head)


def count_changes(
  whole: Int8[Array, " b"],
  variants: Int8[Array, "v b"],
  finite: Bool[Array, " b"],
) -> Int32[Array, "5 v"]:
  """Count the examples of a batch on which a task and its variants differ.

  `whole` are `example_hits` with all memory, `variants` are `example_hits`
  without parts of the memory. For each variant, the five numbers count
  examples: all but padding; right with all memory; wrong only without the part;
  right only without the part; logits not finite with all memory.
  """
  counted = jnp.broadcast_to(whole >= 0, variants.shape)
  right = jnp.broadcast_to(whole == 1, variants.shape)
  lost = (whole[None] == 1) & (variants == 0)
  gained = (whole[None] == 0) & (variants == 1)
  counts = [counted, right, lost, gained, counted & ~finite[None]]
  return jnp.stack(counts).sum(-1, dtype=jnp.int32)


@functools.cache
def _count_program(
  replicated: Any, config: ViTConfig, cells: int
) -> Callable[..., jax.Array]:
  """Return a program that runs a task and its variants on a batch.

  `variant_masks` defines the variants. The program returns the counts that
  `count_changes` computes.
  """
  whole = np.ones((1, config.depth, cells), bool)
  seen = np.concatenate([whole, variant_masks(config.depth, cells)])
  passes = -(-len(seen) // _TOGETHER)
  size = -(-len(seen) // passes)
  # Pad the variants: a smaller last pass would be compiled separately.
  filled = np.pad(
    seen, [(0, passes * size - len(seen)), (0, 0), (0, 0)], "edge"
  )

  def run(
    params: Tree,
    slots: SlotArrays,
    head: Tree,
    context: Context,
    labels: Int[Array, " b"],
    mask: Float32[Array, " b"],
  ) -> Int32[Array, "5 v"]:
    def one(
      cells: Bool[Array, "l m"],
    ) -> tuple[Int8[Array, " b"], Bool[Array, " b"]]:
      logits = logits_without(
        params, slots, head, cells, context, config=config
      )
      hits = class_sums.example_hits(logits, labels, mask)
      return hits, jnp.isfinite(logits).all(-1)

    hits, finite = jax.lax.map(one, filled, batch_size=size)
    return count_changes(hits[0], hits[1 : len(seen)], finite[0])

  return jax.jit(run, out_shardings=replicated)

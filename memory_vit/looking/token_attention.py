"""Attention weights of a task's class token: to the image, to memory, to tasks.

The weights are those of the forward pass (`model/attention_weights.py`), after
the softmax. They do not explain a prediction, because earlier layers already
mix information from the whole image. `attention_rollout` follows this mixing.
"""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Float32

from memory_vit.errors import TaskError
from memory_vit.model.attention_weights import (
  capture,
  weights_of_tasks,
)
from memory_vit.model.backbone import Backbone
from memory_vit.model.context import Context
from memory_vit.model.stacking import SlotArrays
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit import MemoryViT
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.compose import TasksLike
from memory_vit.tasks.program import encode, in_slots
from memory_vit.tasks.slots import Slots


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["image", "memory", "token", "parent_tokens", "parent_memory"],
  meta_fields=["task", "config"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class TokenAttention:
  """Attention weights of a task's class token, in every layer.

  All arrays are NumPy float32, weights after the softmax: averaged over heads,
  or for each head, with an axis h after the axis of layers. In each layer, the
  weights of all fields sum to 1.

  Attributes:
    task: name of the task.
    image: (b, l, s), weights on the tokens of the backbone: class tokens,
      registers, then patches, row by row.
    memory: (b, l, m), weights on the task's own memory in this layer.
    token: (b, l), weight on the class token itself.
    parent_tokens: {name of a task that it attends to: weight (b, l)}.
    parent_memory: {name of a task that it attends to: weights (b, l, m)}.
    config: backbone configuration; it says which of the s tokens are patches.
  """

  task: str
  image: Float32[np.ndarray, "b l *h s"]
  memory: Float32[np.ndarray, "b l *h m"]
  token: Float32[np.ndarray, "b l *h"]
  parent_tokens: dict[str, Float32[np.ndarray, "b l *h"]]
  parent_memory: dict[str, Float32[np.ndarray, "b l *h _"]]
  config: ViTConfig = dataclasses.field(repr=False)

  @property
  def total(self) -> Float32[np.ndarray, "b l *h"]:
    """Sum of all weights in each layer: 1, up to rounding."""
    parts = [self.image, self.memory, *self.parent_memory.values()]
    tokens = [self.token, *self.parent_tokens.values()]
    return sum(tokens, sum(part.sum(-1) for part in parts))

  def of_images(self, rows: slice) -> TokenAttention:
    """Return the attention in a slice of the b images."""
    part: TokenAttention = jax.tree.map(lambda a: a[rows], self)
    return dataclasses.replace(
      part,  # jax.tree.map sorts keys: restore the order of parents
      parent_tokens={
        name: part.parent_tokens[name] for name in self.parent_tokens
      },
      parent_memory={
        name: part.parent_memory[name] for name in self.parent_memory
      },
    )


def token_attention(
  backbone: Backbone,
  tasks: TasksLike | Slots,
  images: Float[ArrayLike, "b side side 3"],
  *,
  per_head: bool = False,
  check: bool = True,
) -> dict[str, TokenAttention]:
  """Compute what the class tokens of tasks attend to.

  The backbone runs in the program of `forward`. The tasks run in a separate
  program, which is compiled once for each shape of the slots and of the batch.

  Args:
    backbone: the frozen ViT.
    tasks: as for `forward`; all tasks that they attend to must be among them.
    images: in [-1, 1], as `preprocess` makes them.
    per_head: whether to return the weights of each head instead of their mean.
    check: whether to check the values of images, see `encode`.

  Returns:
    {task name: its attention}.

  Raises:
    TaskError: for tasks of another backbone, without a token, or that do not
      fit together.
    DataError: for images of a wrong shape or type, or with invalid values.
  """
  _, context = encode(backbone, images, check=check)
  return read_attention(backbone, tasks, context, per_head=per_head)


def slots_with_tokens(
  backbone: Backbone, tasks: TasksLike | Slots
) -> Slots | None:
  """Put tasks into slots; raise `TaskError` for a task without a token."""
  slots = in_slots(backbone, tasks)
  for spec in slots.specs if slots else ():
    if not spec.learned.has_token:
      raise TaskError(
        f"task {spec.name!r} has the regime {spec.regime!r}, which gives it no "
        "class token whose attention could be shown: leave the task out."
      )
  return slots


def read_attention(
  backbone: Backbone,
  tasks: TasksLike | Slots,
  context: Context,
  *,
  per_head: bool = False,
) -> dict[str, TokenAttention]:
  """Compute `token_attention` from a context that `encode` has returned."""
  slots = slots_with_tokens(backbone, tasks)
  if slots is None:
    return {}
  specs = dict(zip(slots.places, slots.specs, strict=True))
  image, tokens, cells = jax.device_get(
    token_attention_program(
      backbone.params,
      slots.arrays,
      context,
      config=backbone.config,
      per_head=per_head,
    )
  )
  mask = jax.device_get(slots.arrays.mask)
  return {
    spec.name: _of_one_task(
      spec.name,
      backbone.config,
      image[:, i],
      tokens[:, i],
      cells[:, i],
      {0: spec}
      | {
        place: specs[j]
        for place, j in enumerate(mask.parents[i].tolist(), start=1)
        if mask.is_parent[i, place - 1]
      },
    )
    for i, spec in specs.items()
  }


@functools.partial(jax.jit, static_argnames=("config", "per_head"))
def token_attention_program(
  backbone_params: Any,
  slots: SlotArrays,
  context: Context,
  *,
  config: ViTConfig,
  per_head: bool,
) -> tuple[Float32[jax.Array, "b t l *_"], ...]:
  """Return the weights of all slots, one array per field of `TaskWeights`."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  _, sown = capture(model, params, slots, context, method="read_slots")
  layers = [weights_of_tasks(layer, slots.stream_mask) for layer in sown]
  if per_head:
    # Move axes from (l, b, h, t, ...) to (b, t, l, h, ...).
    return tuple(
      jnp.moveaxis(jnp.stack(part), (0, 2), (2, 3))
      for part in zip(*layers, strict=True)
    )
  return tuple(
    jnp.stack([weights.mean(1) for weights in part], axis=2)
    for part in zip(*layers, strict=True)
  )


def _of_one_task(
  name: str,
  config: ViTConfig,
  image: Float32[np.ndarray, "b l *h s"],
  tokens: Float32[np.ndarray, "b l *h _"],
  cells: Float32[np.ndarray, "b l *h _ m"],
  read: Mapping[int, TaskSpec],
) -> TokenAttention:
  """Return the attention of a task, without the padding of memory cells.

  `read` is {slot: task}: slot 0 holds the task, and further slots hold its
  parents, the tasks that it attends to.
  """
  memory = {
    place: cells[..., place, : spec.cells] for place, spec in read.items()
  }
  parents = {place: spec.name for place, spec in read.items() if place}
  return TokenAttention(
    task=name,
    image=image,
    memory=memory[0],
    token=tokens[..., 0],
    parent_tokens={
      parent: tokens[..., place] for place, parent in parents.items()
    },
    parent_memory={parent: memory[place] for place, parent in parents.items()},
    config=config,
  )

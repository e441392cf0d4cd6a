"""Attention rollout for the class tokens of tasks.

Abnar and Zuidema, Quantifying Attention Flow in Transformers (ACL 2020): after
each layer a token is half itself (the residual connection) and half what it
attends to (the mean over heads); the product over the layers gives the share of
each input: the tokens of the image, the class tokens of tasks, and memory.
"""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32

from memory_vit.looking.token_attention import slots_with_tokens
from memory_vit.model.attention_weights import (
  TaskWeights,
  capture,
  weights_of_backbone,
  weights_of_tasks,
)
from memory_vit.model.backbone import Backbone
from memory_vit.model.masks import TaskMask
from memory_vit.model.stacking import SlotArrays
from memory_vit.model.vit import MemoryViT
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.compose import TasksLike
from memory_vit.tasks.program import accept_images
from memory_vit.tasks.slots import Slots


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["image", "tokens", "memory"],
  meta_fields=["task", "config"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class AttentionRollout:
  """Contribution of each input to a task's class token after each block.

  All arrays are NumPy float32. In each layer, `image` (summed over s), `tokens`
  and `memory` add up to 1.

  Attributes:
    task: name of the task.
    image: (b, l, s), shares of the image's tokens that enter the first block:
      class tokens, registers, then patches, row by row.
    tokens: (b, l), share of the class tokens of the task and of all tasks that
      it attends to, directly or through other tasks.
    memory: (b, l), share of the memory of these tasks, in all layers so far.
    config: backbone configuration; it says which of the s tokens are patches.
  """

  task: str
  image: Float32[np.ndarray, "b l s"]
  tokens: Float32[np.ndarray, "b l"]
  memory: Float32[np.ndarray, "b l"]
  config: ViTConfig = dataclasses.field(repr=False)

  def of_images(self, rows: slice) -> AttentionRollout:
    """Return the rollout for a slice of the b images."""
    part: AttentionRollout = jax.tree.map(lambda a: a[rows], self)
    return part


def attention_rollout(
  backbone: Backbone,
  tasks: TasksLike | Slots,
  images: Float[ArrayLike, "b side side 3"],
  *,
  check: bool = True,
) -> dict[str, AttentionRollout]:
  """Follow the attention of tasks' class tokens back to the image.

  A rollout needs the attention between the backbone's own tokens, so it runs
  the backbone in a separate program, which may round differently from
  `forward`. `token_attention` costs less: it shares the program of `forward`.

  Args:
    backbone: the frozen ViT.
    tasks: as for `forward`; all tasks that they attend to must be among them.
    images: in [-1, 1], as `preprocess` makes them.
    check: whether to check the values of images, see `encode`.

  Returns:
    {task name: its rollout}.

  Raises:
    TaskError: for tasks of another backbone, without a token, or that do not
      fit together.
    DataError: for images of a wrong shape or type, or with invalid values.
  """
  images, refuse = accept_images(backbone, images, check)
  slots = slots_with_tokens(backbone, tasks)
  if slots is None:
    refuse()
    return {}
  shares = jax.device_get(
    rollout_program(
      backbone.params, slots.arrays, images, config=backbone.config
    )
  )
  refuse()
  return {
    spec.name: AttentionRollout(
      task=spec.name,
      image=shares[:, i, :, :-2],
      tokens=shares[:, i, :, -2],
      memory=shares[:, i, :, -1],
      config=backbone.config,
    )
    for i, spec in zip(slots.places, slots.specs, strict=True)
  }


@functools.partial(jax.jit, static_argnames="config")
def rollout_program(
  backbone_params: Any,
  slots: SlotArrays,
  images: Float[Array, "b side side 3"],
  *,
  config: ViTConfig,
) -> Float32[Array, "b t l _"]:
  """Return s + 2 shares per slot: s image tokens, class tokens, memory."""
  model, params = MemoryViT(config), {"backbone": backbone_params}
  (_, context), sown = capture(model, params, images, method="encode")
  frozen = [weights_of_backbone(layer) for layer in sown]
  _, sown = capture(model, params, slots, context, method="read_slots")
  mask = slots.stream_mask
  tasks = [weights_of_tasks(layer, mask) for layer in sown]
  return roll_out(frozen, tasks, mask)


def roll_out(
  frozen: Sequence[Float[Array, "b h s s"]],
  tasks: Sequence[TaskWeights],
  mask: TaskMask,
) -> Float32[Array, "b t l _"]:
  """Multiply attention weights layer by layer; return shares for each layer."""
  b, _, t, s = tasks[0].image.shape
  # Before the first block, each token consists only of itself.
  image = jnp.broadcast_to(jnp.eye(s, s + 2), (b, s, s + 2))
  token = jnp.broadcast_to(jax.nn.one_hot(s, s + 2), (b, t, s + 2))
  memory = jax.nn.one_hot(s + 1, s + 2)
  seen = jnp.concatenate([jnp.arange(t)[:, None], mask.parents], axis=1)
  after = []
  for layer, weights in zip(frozen, tasks, strict=True):
    to_image, to_tokens, to_cells = (part.mean(1) for part in weights)
    # Tokens attend to the inputs of the block, so compute `read` before `token`
    # and `image` are updated.
    read = jnp.einsum("bts,bsx->btx", to_image, image)
    read += jnp.einsum("btp,btpx->btx", to_tokens, token[:, seen])
    read += to_cells.sum((-2, -1))[..., None] * memory[None, None]
    token = (token + read) / 2
    after.append(token)
    image = (image + jnp.einsum("bqs,bsx->bqx", layer.mean(1), image)) / 2
  return jnp.stack(after, axis=2)

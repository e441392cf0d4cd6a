"""Attention weights of both streams, captured from the forward pass.

Modules sow the weights (`flax.linen.Module.sow`); programs that do not ask for
them do not change.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memory_vit.model.attention import SOWN_BY_BACKBONE, SOWN_BY_TASKS
from memory_vit.model.masks import TaskMask
from memory_vit.model.vit import MemoryViT


class TaskWeights(NamedTuple):
  """The attention weights of all task tokens in one layer."""

  image: Float32[Array, "b h t s"]
  # In `tokens` and `cells`, the task itself comes first, then its parents.
  tokens: Float32[Array, "b h t 1+p"]
  cells: Float32[Array, "b h t 1+p m"]


def capture(
  model: MemoryViT, params: Mapping[str, Any], *args: Any, method: str
) -> tuple[Any, list[Mapping[str, Any]]]:
  """Run "encode" or "read_slots"; also return each layer's sown weights."""
  out, state = model.apply(
    {"params": params}, *args, method=method, mutable=["intermediates"]
  )
  encoder = state["intermediates"]["backbone"]["Transformer"]
  blocks = (encoder[f"encoderblock_{i}"] for i in range(model.config.depth))
  return out, [block["MultiHeadDotProductAttention_0"] for block in blocks]


def weights_of_tasks(sown: Mapping[str, Any], mask: TaskMask) -> TaskWeights:
  """Split the attention weights that a layer has sown in "read_slots"."""
  (weights,) = sown[SOWN_BY_TASKS]
  m, seen = mask.cells.shape[1], 1 + mask.parents.shape[1]
  s = weights.shape[-1] - seen * (1 + m)
  image, tokens, cells = jnp.split(weights, [s, s + seen], axis=-1)
  return TaskWeights(image, tokens, cells.reshape(*tokens.shape, m))


def weights_of_backbone(
  sown: Mapping[str, Any],
) -> Float[Array, "b h s s"]:
  """Return the attention weights that a layer has sown in "encode"."""
  (weights,) = sown[SOWN_BY_BACKBONE]
  return weights

"""Attention weights of both streams, captured as the model computes with them.

The modules sow their weights (`flax.linen.Module.sow`). A program that does not
ask for them is the same as if nothing were sown; one that does gets what the
softmax of the forward pass gave, and nothing is computed a second time.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memory_vit.model.attention import SOWN_BY_BACKBONE, SOWN_BY_TASKS
from memory_vit.model.masks import TaskMask
from memory_vit.model.vit import MemoryViT


class TaskWeights(NamedTuple):
  """What the tokens of tasks attend to in one layer; each row sums to 1.

  Attributes:
    image: onto the tokens of the backbone stream.
    tokens: onto the token of the task, then onto those of its parents.
    cells: onto the memory of the task, then onto that of its parents.
  """

  image: Float32[Array, "b h t s"]
  tokens: Float32[Array, "b h t 1+p"]
  cells: Float32[Array, "b h t 1+p m"]


def capture(
  model: MemoryViT, params: Mapping[str, Any], *args: Any, method: str
) -> tuple[Any, list[Mapping[str, Any]]]:
  """Run a method of the model, and capture the weights of its attention.

  Args:
    model: the module.
    params: its parameters.
    *args: of the method.
    method: "encode" or "read_slots".

  Returns:
    What the method returns, and what was sown in each of the l layers.
  """
  out, state = model.apply(
    {"params": params}, *args, method=method, mutable=["intermediates"]
  )
  encoder = state["intermediates"]["backbone"]["Transformer"]
  blocks = (encoder[f"encoderblock_{i}"] for i in range(model.config.depth))
  return out, [block["MultiHeadDotProductAttention_0"] for block in blocks]


def weights_of_tasks(sown: Mapping[str, Any], mask: TaskMask) -> TaskWeights:
  """The weights of task tokens in one layer.

  Args:
    sown: one of `capture`, of "read_slots".
    mask: of the tasks.
  """
  (weights,) = sown[SOWN_BY_TASKS]
  m, seen = mask.cells.shape[1], 1 + mask.parents.shape[1]
  s = weights.shape[-1] - seen * (1 + m)
  image, tokens, cells = jnp.split(weights, [s, s + seen], axis=-1)
  return TaskWeights(image, tokens, cells.reshape(*tokens.shape, m))


def weights_of_backbone(
  sown: Mapping[str, Any],
) -> Float[Array, "b h s s"]:
  """The weights of the backbone stream in one layer.

  Args:
    sown: one of `capture`, of "encode".
  """
  (weights,) = sown[SOWN_BY_BACKBONE]
  return weights

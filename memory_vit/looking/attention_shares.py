"""Shares of a task's attention in each layer: patches, class tokens, memory."""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float64

from memory_vit.errors import DataError
from memory_vit.looking.token_attention import TokenAttention


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    "patches",
    "backbone_tokens",
    "token",
    "memory",
    "parent_tokens",
    "parent_memory",
  ],
  meta_fields=["task", "images"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class AttentionShares:
  """Shares of the attention of a task's class token.

  All arrays are NumPy float64, means over images and heads. In each layer, the
  shares add up to 1, up to rounding.

  Attributes:
    images: number of images.
    backbone_tokens: share of the backbone's class tokens and registers.
    token: share of the task's own class token.
    parent_tokens: {name of a task that it attends to: share of the token}.
    parent_memory: {name of a task that it attends to: shares of the cells}.
  """

  task: str
  images: int
  patches: Float64[np.ndarray, " l"]
  backbone_tokens: Float64[np.ndarray, " l"]
  token: Float64[np.ndarray, " l"]
  memory: Float64[np.ndarray, "l m"]
  parent_tokens: dict[str, Float64[np.ndarray, " l"]]
  parent_memory: dict[str, Float64[np.ndarray, "l _"]]


def attention_shares(attention: TokenAttention) -> AttentionShares:
  """Average the attention of a task over images and heads."""
  count, last = len(attention.image), attention.config.num_patches
  if not count:
    raise DataError(
      "there is no image: expected attention in at least 1 image."
    )
  image = attention.image
  # `token` is (b, l), or (b, l, h) with an axis for the heads.
  heads = tuple(range(2, attention.token.ndim))

  def mean(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64).mean((0, *heads))

  return AttentionShares(
    task=attention.task,
    images=count,
    patches=mean(image[..., -last:].sum(-1)),
    backbone_tokens=mean(image[..., :-last].sum(-1)),
    token=mean(attention.token),
    memory=mean(attention.memory),
    parent_tokens={k: mean(a) for k, a in attention.parent_tokens.items()},
    parent_memory={k: mean(a) for k, a in attention.parent_memory.items()},
  )


def join_shares(parts: Sequence[AttentionShares]) -> AttentionShares:
  """Average shares of a task over batches, weighted by the number of images."""
  images = sum(part.images for part in parts)

  def mean(*arrays: np.ndarray) -> np.ndarray:
    weighted = zip(parts, arrays, strict=True)
    return np.sum([part.images / images * a for part, a in weighted], axis=0)

  joined: AttentionShares = jax.tree.map(
    mean, *(dataclasses.replace(part, images=images) for part in parts)
  )
  first = parts[0]
  return dataclasses.replace(
    joined,  # jax.tree.map sorts keys: restore the order of parents
    parent_tokens={k: joined.parent_tokens[k] for k in first.parent_tokens},
    parent_memory={k: joined.parent_memory[k] for k in first.parent_memory},
  )

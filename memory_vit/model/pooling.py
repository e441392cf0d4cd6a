"""Pooling: from tokens of the backbone stream to features."""

import dataclasses
import math
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memory_vit.model.attention import (
  MultiHeadDotProductAttention,
  for_each_image,
)
from memory_vit.model.encoder import MlpBlock, layer_norm
from memory_vit.model.regimes import PROBE_QUERIES
from memory_vit.model.trees import AnyArray
from memory_vit.model.vit_config import ViTConfig


# Its parts are named as in big_vision.
class MAPHead(nn.Module):
  """Attention of a learned probe to all tokens (Set Transformer; SigLIP)."""

  config: ViTConfig

  @nn.compact
  def __call__(self, x: Float32[Array, "b s d"]) -> Float32[Array, "b d"]:
    cfg = dataclasses.replace(self.config, mlp="gelu")
    probe = self.param(
      "probe", nn.initializers.xavier_uniform(), (1, 1, cfg.width)
    )
    attention = MultiHeadDotProductAttention(
      cfg, name="MultiHeadDotProductAttention_0"
    )
    probe = for_each_image(probe[0], x)
    # If weights are constants, XLA would compute the query of the probe ahead,
    # in another order of sums: not bitwise identical.
    probe, x = jax.lax.optimization_barrier((probe, x))
    y = attention.pool(probe, x)
    z = layer_norm(cfg, name="LayerNorm_0")(y)
    return (y + MlpBlock(cfg, name="MlpBlock_0")(z))[:, 0]


def mean_of_patches(
  x: Float[Array, "b s d"], config: ViTConfig
) -> Float32[Array, "b d"]:
  """The mean over the patches, without class tokens and registers."""
  first = config.class_tokens + config.registers
  patches = x[:, first : first + config.num_patches]
  return patches.mean(axis=1)


def probe_features(
  params: Mapping[str, AnyArray], summary: Float32[Array, "b n d"]
) -> Float32[Array, "b d"]:
  """Attend to the summary of all layers of a frozen backbone.

  Its tokens are the class token and the mean patch after each block, so a task
  needs no class token of its own, and learns from some kilobytes an image. As
  attentive layer fusion (2026); queries are learned and need no projection to
  keys, as in efficient probing (2026).

  Args:
    params: "query" (q, d) and "bias" (q, n), of the scores; "scale" (n, d),
      "down" (n, d, r) and "up" (n, r, d), of the values: each token times its
      scale, and what a bottleneck of its own adds.
    summary: from `MemoryViT.summarize`.

  Returns:
    Features for a head.
  """
  d = summary.shape[-1]
  scores = jnp.einsum("bnd,qd->bqn", summary, params["query"]) / math.sqrt(d)
  weights = jax.nn.softmax(scores + params["bias"][None])
  weights = jnp.repeat(weights, -(-d // PROBE_QUERIES), axis=1)[:, :d]
  hidden = jnp.einsum("bnd,ndr->bnr", summary, params["down"])
  values = summary * params["scale"][None]
  values = values + jnp.einsum("bnr,nrd->bnd", hidden, params["up"])
  return jnp.einsum("bdn,bnd->bd", weights, values)

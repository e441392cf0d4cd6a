"""Pooling: from tokens of the backbone stream to features."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memory_vit.model.attention import (
  MultiHeadDotProductAttention,
  for_each_image,
)
from memory_vit.model.encoder import MlpBlock
from memory_vit.model.layer_norms import layer_norm
from memory_vit.model.vit_config import ViTConfig


# Submodules are named as in big_vision, so that its checkpoints can be loaded.
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
    # With constant weights, XLA would compute the probe's query at compile time
    # in another order of summation, and so change the results slightly.
    probe, x = jax.lax.optimization_barrier((probe, x))
    y = attention.pool(probe, x)
    z = layer_norm(cfg, name="LayerNorm_0")(y)
    return (y + MlpBlock(cfg, name="MlpBlock_0")(z))[:, 0]


def mean_of_patches(
  x: Float[Array, "b s d"], config: ViTConfig
) -> Float32[Array, "b d"]:
  """Return the mean over patches, without class tokens and registers."""
  first = config.class_tokens + config.registers
  patches = x[:, first : first + config.num_patches]
  return patches.mean(axis=1, dtype=jnp.float32)

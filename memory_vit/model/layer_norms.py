"""LayerNorms of a backbone, and one without parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memory_vit.model.vit_config import ViTConfig


def layer_norm(config: ViTConfig, name: str | None = None) -> nn.LayerNorm:
  return nn.LayerNorm(epsilon=config.layer_norm_epsilon, name=name)


def standardized(
  z: Float[Array, "..."], epsilon: float
) -> Float32[Array, "..."]:
  """Tokens of mean 0 and variance 1: a LayerNorm without parameters."""
  values = z - z.mean(-1, keepdims=True)
  variance = jnp.square(values).mean(-1, keepdims=True)
  return values * jax.lax.rsqrt(variance + epsilon)

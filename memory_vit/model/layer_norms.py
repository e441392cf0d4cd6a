"""LayerNorms of a backbone, and a LayerNorm without parameters."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memory_vit.model.vit_config import ViTConfig


def layer_norm(config: ViTConfig, name: str | None = None) -> nn.LayerNorm:
  return nn.LayerNorm(epsilon=config.layer_norm_epsilon, name=name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def standardized(
  z: Float[Array, "..."], epsilon: float
) -> Float32[Array, "..."]:
  """Shift and scale tokens to mean 0 and variance 1, without parameters."""
  return _standardized(z, epsilon)[0]


def _standardized(
  z: Float[Array, "..."], epsilon: float
) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
  """Return standardized tokens, and 1 / standard deviation of each token."""
  values = z - z.mean(-1, keepdims=True)
  variance = jnp.square(values).mean(-1, keepdims=True)
  scale = jax.lax.rsqrt(variance + epsilon)
  return values * scale, scale


# This gradient stores and reduces fewer arrays than automatic differentiation.
def _backward(epsilon: float, saved: Any, gradient: Any) -> tuple[Any]:
  result, scale = saved
  mean = gradient.mean(-1, keepdims=True)
  along = (gradient * result).mean(-1, keepdims=True)
  return (scale * (gradient - mean - result * along),)


def _forward(z: Any, epsilon: float) -> tuple[Any, tuple[Any, Any]]:
  result, scale = _standardized(z, epsilon)
  return result, (result, scale)


standardized.defvjp(_forward, _backward)

"""Plain ViT of Flax's own layers, and LoRA on it, to compare with.

As vit_jax writes it: `nn.MultiHeadDotProductAttention`, and everything between
two products in the compute dtype.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import memory_vit as mv

_RANK = 8


class PlainViT(nn.Module):
  """A ViT without tasks."""

  config: mv.ViTConfig
  classes: int

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Logits (b, classes) of images (b, side, side, 3)."""
    cfg, size = self.config, (self.config.patch_size,) * 2
    x = nn.Conv(cfg.width, size, size, "VALID", dtype=cfg.dtype)(images)
    x = x.reshape(x.shape[0], -1, cfg.width)
    cls = self.param("cls", nn.initializers.zeros, (1, 1, cfg.width))
    cls = jnp.tile(cls, (x.shape[0], 1, 1)).astype(x.dtype)
    x = jnp.concatenate([cls, x], axis=1)
    shape = (1, *x.shape[1:])
    x = x + self.param("positions", nn.initializers.normal(0.02), shape)
    x = x.astype(cfg.dtype)
    for _ in range(cfg.depth):
      x = _Block(cfg)(x)
    x = nn.LayerNorm(dtype=cfg.dtype)(x)
    return nn.Dense(self.classes, dtype=cfg.dtype)(x[:, 0])


class _Block(nn.Module):
  config: mv.ViTConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    cfg, dtype = self.config, self.config.dtype
    y = nn.LayerNorm(dtype=dtype)(x)
    y = nn.MultiHeadDotProductAttention(
      cfg.num_heads, dtype=dtype, deterministic=True
    )(y, y)
    x = x + y
    y = nn.Dense(cfg.mlp_dim, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
    return x + nn.Dense(cfg.width, dtype=dtype)(nn.gelu(y))


def init_lora(model: PlainViT, params: Any) -> Any:
  """Factors (d, 8) and (8, d) of queries and values, and a head."""
  cfg = model.config
  factors = {
    "a": jnp.zeros((cfg.width, _RANK)),
    "b": jnp.zeros((_RANK, cfg.width)),
  }
  blocks = {
    name: {"query": factors, "value": factors}
    for name in params
    if name.startswith("_Block")
  }
  return {"blocks": blocks, "head": params["Dense_0"]}


def with_lora(params: Any, lora: Any) -> Any:
  """Add the products of the factors to the frozen kernels."""
  params = {**params, "Dense_0": lora["head"]}
  for name, factors in lora["blocks"].items():
    attention = dict(params[name]["MultiHeadDotProductAttention_0"])
    for part, pair in factors.items():
      kernel = attention[part]["kernel"]
      added = (pair["a"] @ pair["b"]).reshape(kernel.shape)
      attention[part] = {**attention[part], "kernel": kernel + added}
    params[name] = {
      **params[name], "MultiHeadDotProductAttention_0": attention,
    }  # fmt: skip
  return params

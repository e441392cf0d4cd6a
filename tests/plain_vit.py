"""The published ViT, of flax's own layers; knows of no task."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import memory_vit as mv


class PlainViT(nn.Module):
  """The published ViT, of flax's own layers; knows of no task."""

  config: mv.ViTConfig

  @nn.compact
  def __call__(self, images):
    cfg = self.config
    kwargs = {"dtype": cfg.dtype}
    patch = (cfg.patch_size,) * 2
    x = nn.Conv(
      cfg.width, patch, patch, padding="VALID", name="embedding", **kwargs
    )(images.astype(cfg.dtype))
    x = x.reshape(len(x), -1, cfg.width)
    cls = self.param("cls", nn.initializers.zeros, (1, 1, cfg.width))
    cls = jnp.tile(cls, (len(x), 1, 1)).astype(x.dtype)
    x = jnp.concatenate([cls, x], axis=1)
    x = PlainEncoder(cfg, name="Transformer")(x)
    return nn.Dense(cfg.num_classes, name="head")(x[:, 0].astype(jnp.float32))

  def jitted(self, params, images):
    return jax.jit(self.apply)({"params": params}, images)


class PlainEncoder(nn.Module):
  config: mv.ViTConfig

  @nn.compact
  def __call__(self, x):
    cfg = self.config
    x = x + PlainPosition(cfg, name="posembed_input")().astype(x.dtype)
    for i in range(cfg.depth):
      x = PlainBlock(cfg, name=f"encoderblock_{i}")(x)
    return nn.LayerNorm(name="encoder_norm")(x)


class PlainPosition(nn.Module):
  config: mv.ViTConfig

  @nn.compact
  def __call__(self):
    shape = (1, self.config.num_patches + 1, self.config.width)
    return self.param("pos_embedding", nn.initializers.zeros, shape)


class PlainBlock(nn.Module):
  config: mv.ViTConfig

  @nn.compact
  def __call__(self, x):
    cfg = self.config
    y = nn.LayerNorm(dtype=cfg.dtype)(x)
    attention = nn.MultiHeadDotProductAttention(cfg.num_heads, dtype=cfg.dtype)
    x = x + attention(y, y)
    y = nn.LayerNorm(dtype=cfg.dtype)(x)
    return x + PlainMlp(cfg, name="MlpBlock_0")(y)


class PlainMlp(nn.Module):
  config: mv.ViTConfig

  @nn.compact
  def __call__(self, x):
    x = nn.gelu(nn.Dense(self.config.mlp_dim, dtype=self.config.dtype)(x))
    return nn.Dense(self.config.width, dtype=self.config.dtype)(x)

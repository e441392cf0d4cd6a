"""The published ViT, of flax's own layers; knows of no task."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import memory_vit as mv
from memory_vit.model import trees

# Its products sum in float32, as ours do in bfloat16.
WIDE = {"preferred_element_type": jnp.float32}
# As in `products`: XLA for CPUs cannot run them before.
OLD = jax.__version_info__ < (0, 10)


def dot_general(a, b, *dimensions, **_):
  if OLD:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return jax.lax.dot_general(a, b, *dimensions, **WIDE)


def with_flax_biases(backbone):
  """Round biases to the compute dtype; flax does so, and we add them whole."""
  flat = trees.flatten(backbone.params)
  for name, array in flat.items():
    if name.endswith("bias") and "Norm" not in name and "head" not in name:
      rounded = jnp.asarray(array, backbone.config.dtype)
      flat[name] = np.asarray(rounded, np.float32)
  return dataclasses.replace(backbone, params=trees.unflatten(flat))


def einsum(spec, a, b):
  if OLD:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return jnp.einsum(spec, a, b, **WIDE)


class PlainViT(nn.Module):
  """The published ViT, of flax's own layers; knows of no task."""

  config: mv.ViTConfig

  @nn.compact
  def __call__(self, images):
    cfg = self.config
    b, p = len(images), cfg.patch_size
    g = cfg.image_size // p
    patches = images.reshape(b, g, p, g, p, 3).swapaxes(2, 3)
    x = nn.DenseGeneral(
      cfg.width, axis=(-3, -2, -1), dtype=cfg.dtype, dot_general=dot_general,
      name="embedding",
    )(patches.reshape(b, g * g, p, p, 3))  # fmt: skip
    cls = self.param("cls", nn.initializers.zeros, (1, 1, cfg.width))
    cls = jnp.tile(cls, (len(x), 1, 1))
    x = jnp.concatenate([cls, x], axis=1)
    x = PlainEncoder(cfg, name="Transformer")(x)
    return nn.Dense(cfg.num_classes, name="head")(x[:, 0])

  def jitted(self, params, images):
    return jax.jit(self.apply)({"params": params}, images)


class PlainEncoder(nn.Module):
  config: mv.ViTConfig

  @nn.compact
  def __call__(self, x):
    cfg = self.config
    x = x + PlainPosition(cfg, name="posembed_input")()
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
    y = nn.LayerNorm()(x)
    attention = nn.MultiHeadDotProductAttention(
      cfg.num_heads, dtype=cfg.dtype,
      qkv_dot_general=dot_general, out_dot_general=dot_general,
      qk_attn_weights_einsum_cls=lambda: einsum,
      attn_weights_value_einsum_cls=lambda: einsum,
    )  # fmt: skip
    x = (x + attention(y, y)).astype(cfg.dtype)
    y = nn.LayerNorm()(x)
    return (x + PlainMlp(cfg, name="MlpBlock_0")(y)).astype(cfg.dtype)


class PlainMlp(nn.Module):
  config: mv.ViTConfig

  @nn.compact
  def __call__(self, x):
    dense = functools.partial(
      nn.Dense, dtype=self.config.dtype, dot_general=dot_general
    )
    x = nn.gelu(dense(self.config.mlp_dim)(x))
    return dense(self.config.width)(x)

"""Baseline: the same model as one long sequence under one dense mask.

Patches and task tokens form one sequence; the memory of all tasks adds keys and
values in every layer; the mask is Table 1 of the paper. The outputs are those
of `mv.forward`, but every token is scored against every key, and the gradient
for the tasks passes through the tokens of the backbone, on which it does not
depend.

The baseline is optimized: keys and values of memory are computed once per
batch, products of heads run with the heads in front, and frozen weights get no
gradient.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import memory_vit as mv
from memory_vit.model.products import einsum
from memory_vit.model.vit import apply, patches_of
from memory_vit.runtime.dtypes import Precision
from memory_vit.tasks.split_forward import Logits, SplitForward

_FLOAT32 = Precision("float32")


def forward(
  backbone: Any,
  tasks: dict[str, Any],
  images: jax.Array,
  *,
  config: mv.ViTConfig,
  specs: tuple[mv.TaskSpec, ...],
) -> dict[str, jax.Array]:
  """Original model and all tasks, as `mv.forward`; memory is layer-normed."""
  own = [tasks[spec.name] for spec in specs]
  memory = jnp.concatenate([task["memory"] for task in own], axis=1)
  mask = may_attend(specs, config.num_patches + 1)
  z = _tokens(backbone, own, images, config)
  encoder = backbone["Transformer"]
  for i in range(config.depth):
    z = _block(encoder[f"encoderblock_{i}"], z, memory[i], mask, config)
  z = _layer_norm(encoder["encoder_norm"], z)
  heads = {
    spec.name: _dense(task["head"], z[:, config.num_patches + 1 + i])
    for i, (spec, task) in enumerate(zip(specs, own, strict=True))
  }
  return {"backbone": _original(backbone, z[:, 0], config), **heads}


forward_program = jax.jit(forward, static_argnames=("config", "specs"))


def masked_sequence_pass(
  config: mv.ViTConfig, specs: tuple[mv.TaskSpec, ...]
) -> SplitForward:
  """The counterpart of `make_split_forward`, without a frozen part."""

  def logits(trained: Any, frozen: Any, images: jax.Array) -> Logits:
    outputs = forward(
      frozen["backbone"], trained, images, config=config, specs=specs
    )
    return {name: outputs[name] for name in trained}

  return SplitForward(lambda frozen, images: images, logits)


def may_attend(specs: Sequence[mv.TaskSpec], tokens: int) -> np.ndarray:
  """Table 1 of the paper: queries (tokens + t), keys (with all cells)."""
  names = [spec.name for spec in specs]
  owner = np.repeat(np.arange(len(specs)), [spec.cells for spec in specs])
  reads = np.array(
    [[n == spec.name or n in spec.attends_to for n in names] for spec in specs]
  )
  from_tasks = np.concatenate(
    [np.ones((len(specs), tokens), bool), reads, reads[:, owner]], axis=1
  )
  from_backbone = np.arange(from_tasks.shape[1]) < tokens
  return np.concatenate([np.tile(from_backbone, (tokens, 1)), from_tasks])


def _tokens(
  backbone: Any, tasks: list[Any], images: jax.Array, config: mv.ViTConfig
) -> jax.Array:
  """[class, patches, class of every task], (b, n + 1 + t, d)."""
  b = images.shape[0]
  patches = patches_of(images, config).reshape(b, config.num_patches, -1)
  x = _dense(backbone["embedding"], patches, config.precision)
  position = backbone["Transformer"]["posembed_input"]["pos_embedding"]
  cls = jnp.stack([backbone["cls"][0, 0], *(task["cls"] for task in tasks)])
  cls = cls + position[:, 0]
  cls = jnp.broadcast_to(cls, (b, *cls.shape))
  x = x + position[:, 1:]
  return jnp.concatenate([cls[:, :1], x, cls[:, 1:]], axis=1)


def _block(
  p: Any,
  z: jax.Array,
  memory: jax.Array,
  mask: np.ndarray,
  config: mv.ViTConfig,
) -> jax.Array:
  """One block: tokens z (b, s, d), memory (cells of all tasks, d)."""
  # Memory shares the LayerNorm of the tokens (Figure 2 of the paper).
  cells = _layer_norm(p["LayerNorm_0"], memory)
  normed = _layer_norm(p["LayerNorm_0"], z)
  attention = p["MultiHeadDotProductAttention_0"]
  z = (z + _attend(attention, normed, cells, mask, config)).astype(config.dtype)
  y = _layer_norm(p["LayerNorm_1"], z)
  y = _dense(p["MlpBlock_0"]["Dense_0"], y, config.precision)
  y = nn.gelu(y, approximate=config.gelu == "tanh")
  y = _dense(p["MlpBlock_0"]["Dense_1"], y, config.precision)
  return (z + y).astype(config.dtype)  # as our tokens between halves of a block


def _attend(
  p: Any, z: jax.Array, cells: jax.Array, mask: np.ndarray, config: mv.ViTConfig
) -> jax.Array:
  """Masked attention of tokens z (b, s, d) to tokens and cells."""
  precision = config.precision
  split = functools.partial(_split_heads, heads=config.num_heads)
  q = split(_dense(p["query"], z, precision)) / math.sqrt(config.head_dim)
  k, v = (
    split(
      _append(_dense(p[name], z, precision), _dense(p[name], cells, precision))
    )
    for name in ("key", "value")
  )
  scores = einsum("bhqk,bhsk->bhqs", q, k, precision)
  weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf))
  mixed = einsum("bhqs,bhsk->bhqk", weights, v, precision)
  return _dense(p["out"], jnp.swapaxes(mixed, 1, 2).reshape(z.shape), precision)


def _append(tokens: jax.Array, cells: jax.Array) -> jax.Array:
  """Append the cells (m, d) to the tokens (b, s, d) of every image."""
  cells = jnp.broadcast_to(cells, (tokens.shape[0], *cells.shape))
  return jnp.concatenate([tokens, cells], axis=1)


def _split_heads(a: jax.Array, heads: int) -> jax.Array:
  """(b, s, d) -> (b, h, s, k)."""
  return jnp.swapaxes(a.reshape(*a.shape[:2], heads, -1), 1, 2)


def _dense(p: Any, x: jax.Array, precision: Precision = _FLOAT32) -> jax.Array:
  """A linear layer; kernels of heads are multiplied as matrices."""
  kernel = p["kernel"].reshape(x.shape[-1], -1)
  bias = p["bias"].reshape(*[1] * (x.ndim - 1), -1)
  return einsum("...d,df->...f", x, kernel, precision) + bias


def _layer_norm(p: Any, x: jax.Array) -> jax.Array:
  return apply(nn.LayerNorm(epsilon=1e-6), p, x, method="__call__")


def _original(backbone: Any, y: jax.Array, config: mv.ViTConfig) -> jax.Array:
  """The original outputs of the ViT, (b, c0)."""
  if config.representation_size:
    y = jnp.tanh(_dense(backbone["pre_logits"], y))
  return _dense(backbone["head"], y) if config.num_classes else y

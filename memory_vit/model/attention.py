"""Multi-head attention, with one set of weights, on two streams.

The backbone stream attends to itself. A token of the task stream attends to the
keys and values of the backbone stream, of the tasks and memory that it may see.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from memory_vit.model.masks import TaskMask
from memory_vit.model.vit_config import ViTConfig

# Keys and values (b, h, s, k) of a set of tokens, in one layer.
KeysValues = tuple[jax.Array, jax.Array]


class HeadProjection(nn.Module):
  """Query, key or value: (..., s, d) -> (..., s, h, k).

  As flax's own layer, but for this: the kernel, of the published shape
  (d, h, k), is multiplied as a matrix, or the backward pass would write a
  transposed copy of it (a third of a training step on CPU).
  """

  config: ViTConfig

  @nn.compact
  def __call__(self, z: jax.Array) -> jax.Array:
    """Returns (..., s, h, k)."""
    cfg = self.config
    shape = (cfg.num_heads, cfg.head_dim)
    kernel = self.param("kernel", _lecun(-3, (-2, -1)), (cfg.width, *shape))
    bias = self.param("bias", nn.initializers.zeros, shape)
    kernel = kernel.reshape(cfg.width, -1).astype(cfg.dtype)
    y = z @ kernel + bias.reshape(1, 1, -1).astype(cfg.dtype)
    return y.reshape(*y.shape[:-1], *shape)


class OutProjection(nn.Module):
  """Joins the heads: (b, s, h, k) -> (b, s, d); see `HeadProjection`."""

  config: ViTConfig

  @nn.compact
  def __call__(self, y: jax.Array) -> jax.Array:
    """Returns (b, s, d)."""
    cfg = self.config
    shape = (cfg.num_heads, cfg.head_dim, cfg.width)
    kernel = self.param("kernel", _lecun((-3, -2), -1), shape)
    bias = self.param("bias", nn.initializers.zeros, (cfg.width,))
    kernel = kernel.reshape(cfg.width, cfg.width).astype(cfg.dtype)
    y = y.reshape(*y.shape[:2], cfg.width) @ kernel
    return y + bias[None, None].astype(cfg.dtype)


def _lecun(in_axis: Any, out_axis: Any) -> Any:
  return nn.initializers.lecun_normal(in_axis=in_axis, out_axis=out_axis)


def _heads_first(a: jax.Array) -> jax.Array:
  """(..., s, h, k) -> (..., h, s, k), and back.

  The order in which products of heads are computed: what the backbone stream
  hands over is read many times, and need not be turned round each time.
  """
  return jnp.swapaxes(a, -3, -2)


class MultiHeadDotProductAttention(nn.Module):
  """Attention of either stream, with one set of projections."""

  config: ViTConfig

  def setup(self) -> None:
    """Declares the projections by hand: the methods share them."""
    self.query = HeadProjection(self.config)
    self.key = HeadProjection(self.config)
    self.value = HeadProjection(self.config)
    self.out = OutProjection(self.config)

  def encode(
    self, z: jax.Array, cells: KeysValues | None = None
  ) -> tuple[jax.Array, KeysValues]:
    """Self-attention of the backbone stream.

    Args:
      z: (b, s, d) normed tokens.
      cells: keys and values of memory that every token attends to, (1, h, m, k)
        each; None in the plain ViT.

    Returns:
      (b, s, d), and the keys and values of `z`, (b, h, s, k) each.
    """
    q, k, v = self.query(z), self.key(z), self.value(z)
    own = _heads_first(k), _heads_first(v)
    if cells is not None:
      k, v = _with_cells(k, cells[0]), _with_cells(v, cells[1])
    # As flax's own layer: with the softmax of bfloat16 in float32, a plain ViT
    # that is compiled apart would not have the same bits.
    return self.out(nn.dot_product_attention(q, k, v)), own

  def read(
    self,
    c: jax.Array,
    context: KeysValues,
    cells: KeysValues,
    mask: TaskMask,
  ) -> jax.Array:
    """Attention of the task stream to all that each task sees.

    Args:
      c: (b, t, d) normed class tokens of the tasks.
      context: keys and values of the backbone stream, (b, h, n + 1, k) each.
      cells: keys and values of the tasks' memory, (t, h, m, k) each.
      mask: who sees whom.

    Returns:
      (b, t, d).
    """
    query = _heads_first(self.query(c))
    mixed = attend_from_tasks(query, context, self.keys_values(c), cells, mask)
    return self.out(_heads_first(mixed))

  def keys_values(self, z: jax.Array) -> KeysValues:
    """Keys and values of normed tokens (..., s, d), (..., h, s, k) each."""
    return _heads_first(self.key(z)), _heads_first(self.value(z))


def _with_cells(a: jax.Array, cells: jax.Array) -> jax.Array:
  """Keys or values (b, s, h, k) and (1, h, m, k) -> (b, s + m, h, k)."""
  cells = jnp.broadcast_to(
    _heads_first(cells), (a.shape[0], cells.shape[2], *a.shape[2:])
  )
  return jnp.concatenate([a, cells], axis=1)


def attend_from_tasks(
  query: jax.Array,
  context: KeysValues,
  own: KeysValues,
  cells: KeysValues,
  mask: TaskMask,
) -> jax.Array:
  """One softmax of every task token over all that it sees.

  Args:
    query: (b, h, t, k).
    context: keys and values of the backbone stream, (b, h, n + 1, k) each.
    own: those of the task tokens, (b, h, t, k) each.
    cells: those of the memory, (t, h, m, k) each.
    mask: who sees whom.

  Returns:
    (b, h, t, k).
  """
  tokens = [_with_parents(a, mask.parents, axis=2) for a in own]
  cells = [_with_parents(a, mask.parents, axis=0) for a in cells]
  sees_token, sees_cell = _masks(mask)

  query = query / math.sqrt(query.shape[-1])
  to_cells = jnp.einsum("bhtk,tphmk->bhtpm", query, cells[0])
  scores = [
    jnp.einsum("bhtk,bhsk->bhts", query, context[0]),
    _hide(jnp.einsum("bhtk,bhtpk->bhtp", query, tokens[0]), sees_token),
    _hide(to_cells, sees_cell).reshape(*query.shape[:3], -1),
  ]
  ends = [scores[0].shape[-1], scores[0].shape[-1] + scores[1].shape[-1]]
  # In float32 whatever the rest is computed in: it is a sum over many.
  scores = jnp.concatenate(scores, axis=-1).astype(jnp.float32)
  weights = jax.nn.softmax(scores).astype(query.dtype)
  to_context, to_tokens, to_cells_ = jnp.split(weights, ends, axis=-1)
  return (
    jnp.einsum("bhts,bhsk->bhtk", to_context, context[1])
    + jnp.einsum("bhtp,bhtpk->bhtk", to_tokens, tokens[1])
    + jnp.einsum(
      "bhtpm,tphmk->bhtk", to_cells_.reshape(to_cells.shape), cells[1]
    )
  )


def _with_parents(a: jax.Array, parents: jax.Array, axis: int) -> jax.Array:
  """Gives every task its own entry of `a`, and after it those of its parents.

  A parent is read as it is: the loss of a task never trains another one.

  Args:
    a: (..., t, ...) with the tasks along `axis`.
    parents: (t, p).
    axis: of the tasks.

  Returns:
    (..., t, 1 + p, ...). In concatenation p is 0 and nothing is gathered.
  """
  read = jnp.take(jax.lax.stop_gradient(a), parents, axis=axis)
  return jnp.concatenate([jnp.expand_dims(a, axis + 1), read], axis + 1)


def _masks(mask: TaskMask) -> tuple[jax.Array, jax.Array]:
  """Masks over gathered tokens (t, 1 + p) and cells (t, 1 + p, m)."""
  itself = jnp.ones((mask.parents.shape[0], 1), bool)
  sees_token = jnp.concatenate([itself, mask.is_parent], axis=1)
  has_cell = _with_parents(mask.cells, mask.parents, axis=0)
  return sees_token, sees_token[:, :, None] & has_cell


def _hide(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """Sets scores (b, h, t, ...) of what `seen` (t, ...) leaves out to -inf."""
  return jnp.where(seen[None, None], scores, -jnp.inf)

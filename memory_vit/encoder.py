"""The encoder: one set of weights, called on two streams.

  backbone stream  x (b, n + 1, d): the plain ViT; nothing else is ever in its
                   sequence.
  task stream      c (b, t, d): one token per task. It queries the keys and
                   values of the backbone stream, of the tasks that it may see,
                   and of the memory that it may see.

The modules are named as in the published checkpoints, so that the parameter
tree is the published one.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from memory_vit.tasks import View
from memory_vit.trees import Tree
from memory_vit.variants import ViTConfig

# Keys and values (b, h, s, k) of a set of tokens, in one layer.
KeysValues = tuple[jax.Array, jax.Array]
# Those of every layer. Of the backbone stream: all a task sees of a picture.
Context = tuple[KeysValues, ...]


class MlpBlock(nn.Module):
  """The MLP of a block, on any tokens (..., d)."""

  config: ViTConfig

  @nn.compact
  def __call__(self, z: jax.Array) -> jax.Array:
    """Returns (..., d)."""
    cfg = self.config
    # In this order: flax numbers the layers as they are made.
    z = nn.Dense(cfg.mlp_dim, dtype=cfg.dtype, name="Dense_0")(z)
    z = nn.gelu(z, approximate=cfg.gelu == "tanh")
    return nn.Dense(cfg.width, dtype=cfg.dtype, name="Dense_1")(z)


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
    y = z @ kernel + bias.reshape(-1).astype(cfg.dtype)
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
    return y.reshape(*y.shape[:2], cfg.width) @ kernel + bias.astype(cfg.dtype)


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
    """Declares the projections by hand: two methods share them."""
    self.query = HeadProjection(self.config)
    self.key = HeadProjection(self.config)
    self.value = HeadProjection(self.config)
    self.out = OutProjection(self.config)

  def __call__(
    self,
    z: jax.Array,
    context: KeysValues | None = None,
    cells: KeysValues | None = None,
    view: View | None = None,
  ) -> tuple[jax.Array, KeysValues]:
    """Attends from the tokens of one stream.

    Args:
      z: (b, s, d) normed tokens; s is n + 1 or t.
      context: None on the backbone stream, which attends to itself; on the task
        stream the backbone's keys and values, (b, h, n + 1, k) each.
      cells: keys and values of the tasks' memory, (t, h, m, k) each. On the
        backbone stream, of one task whose memory every token attends to.
      view: who sees whom, on the task stream.

    Returns:
      (b, s, d), and the keys and values of `z`, (b, h, s, k) each.
    """
    q, k, v = self.query(z), self.key(z), self.value(z)
    own = _heads_first(k), _heads_first(v)
    if context is None:
      if cells is not None:
        k, v = _with_cells(k, cells[0]), _with_cells(v, cells[1])
      # As flax's own layer: with the softmax of bfloat16 in float32, a plain
      # ViT that is compiled apart would not have the same bits.
      mixed = nn.dot_product_attention(q, k, v)
    else:
      mixed = attend_from_tasks(_heads_first(q), context, own, cells, view)
      mixed = _heads_first(mixed)
    return self.out(mixed), own

  def keys_values(self, z: jax.Array) -> KeysValues:
    """Those of normed cells that never query: (t, m, d) -> (t, h, m, k)."""
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
  view: View,
) -> jax.Array:
  """One softmax of every task token over all that it sees.

  Args:
    query: (b, h, t, k).
    context: keys and values of the backbone stream, (b, h, n + 1, k) each.
    own: those of the task tokens, (b, h, t, k) each.
    cells: those of the memory, (t, h, m, k) each.
    view: who sees whom.

  Returns:
    (b, h, t, k).
  """
  tokens = [_with_parents(a, view.parents, axis=2) for a in own]
  cells = [_with_parents(a, view.parents, axis=0) for a in cells]
  sees_token, sees_cell = _masks(view)

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


def _masks(view: View) -> tuple[jax.Array, jax.Array]:
  """Which gathered tokens (t, 1 + p) and cells (t, 1 + p, m) are seen."""
  itself = jnp.ones((view.parents.shape[0], 1), bool)
  sees_token = jnp.concatenate([itself, view.is_parent], axis=1)
  has_cell = _with_parents(view.cells, view.parents, axis=0)
  return sees_token, sees_token[:, :, None] & has_cell


def _hide(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """Sets scores (b, h, t, ...) of what `seen` (t, ...) leaves out to -inf."""
  return jnp.where(seen, scores, -jnp.inf)


class EncoderBlock(nn.Module):
  """A pre-norm block, on the tokens of either stream."""

  config: ViTConfig

  def setup(self) -> None:
    """Declares the parts, under their published names."""
    cfg = self.config
    self.LayerNorm_0 = _layer_norm(cfg)
    self.MultiHeadDotProductAttention_0 = MultiHeadDotProductAttention(cfg)
    self.LayerNorm_1 = _layer_norm(cfg)
    self.MlpBlock_0 = MlpBlock(cfg)

  def __call__(
    self,
    z: jax.Array,
    context: KeysValues | None = None,
    cells: KeysValues | None = None,
    view: View | None = None,
    adapters: Tree | None = None,
  ) -> tuple[jax.Array, KeysValues]:
    """Arguments and results as in `MultiHeadDotProductAttention`, un-normed.

    `adapters` come after attention and after the MLP, each on its way to the
    residual stream.
    """
    mixed, keys_values = self.MultiHeadDotProductAttention_0(
      self.LayerNorm_0(z), context, cells, view
    )
    z = z + (adapt(adapters["attention"], mixed) if adapters else mixed)
    y = self.MlpBlock_0(self.LayerNorm_1(z))
    return z + (adapt(adapters["mlp"], y) if adapters else y), keys_values

  def keys_values(self, memory: jax.Array, norm: jax.Array) -> KeysValues:
    """Keys and values of memory, which depend on no picture.

    Memory joins before the first LayerNorm (Figure 2 of the paper). It has no
    query, no MLP and no residual: it ends in this block's attention.

    Args:
      memory: (t, m, d).
      norm: bool (t,), see `TaskSpec.memory_norm`.

    Returns:
      (t, h, m, k) each.
    """
    plain = memory.astype(self.config.dtype)
    normed = jnp.where(norm[:, None, None], self.LayerNorm_0(memory), plain)
    return self.MultiHeadDotProductAttention_0.keys_values(normed)


def adapt(params: Tree, y: jax.Array) -> jax.Array:
  """A bottleneck adapter (Houlsby et al. 2019) on (..., d).

  Args:
    params: {"down": {"kernel": (d, r), "bias": (r,)}, "up": {"kernel": (r, d),
      "bias": (d,)}}.
    y: what it adds to.
  """
  down, up = jax.tree.map(
    lambda a: a.astype(y.dtype), (params["down"], params["up"])
  )
  hidden = nn.gelu(y @ down["kernel"] + down["bias"])
  return y + hidden @ up["kernel"] + up["bias"]


def _layer_norm(config: ViTConfig) -> nn.LayerNorm:
  return nn.LayerNorm(epsilon=1e-6, dtype=config.dtype)


class AddPositionEmbedding(nn.Module):
  """Adds what was learned for each position; that of the class comes first."""

  config: ViTConfig

  @nn.compact
  def __call__(self, z: jax.Array, is_class: bool) -> jax.Array:
    """(b, n + 1, d), or class tokens (b, t, d) alone -> the same shape."""
    cfg = self.config
    embedding = self.param(
      "pos_embedding",
      nn.initializers.normal(0.02),
      (1, cfg.num_patches + 1, cfg.width),
    )
    # Every class token stands at position 0 (Figure 3 of the paper).
    embedding = embedding[:, :1] if is_class else embedding
    return z + embedding.astype(z.dtype)


class Encoder(nn.Module):
  """Position embedding, l blocks and the last LayerNorm, on either stream."""

  config: ViTConfig

  def setup(self) -> None:
    """Declares the parts; a list `encoderblock` makes `encoderblock_0`, ..."""
    cfg = self.config
    self.posembed_input = AddPositionEmbedding(cfg)
    self.encoderblock = [EncoderBlock(cfg) for _ in range(cfg.depth)]
    # What a head reads stays in float32.
    self.encoder_norm = nn.LayerNorm(epsilon=1e-6, dtype=jnp.float32)

  def __call__(
    self,
    z: jax.Array,
    context: Context | None = None,
    cells: Context | None = None,
    view: View | None = None,
  ) -> tuple[jax.Array, Context]:
    """Runs one stream.

    Args:
      z: (b, n + 1, d) backbone stream, or (b, t, d) task stream.
      context: None on the backbone stream; its result on the task stream.
      cells: from `keys_values`, on the task stream.
      view: who sees whom, on the task stream.

    Returns:
      (b, s, d), and the keys and values of `z` in every layer.
    """
    is_task = context is not None
    z = self.posembed_input(z, is_class=is_task)
    keys_values = []
    for i, block in enumerate(self.encoderblock):
      z, kv = block(z, context[i], cells[i], view) if is_task else block(z)
      keys_values.append(kv)
    return self.encoder_norm(z), tuple(keys_values)

  def tuned(
    self,
    z: jax.Array,
    *,
    attention: str,
    memory: jax.Array | None = None,
    memory_norm: bool = True,
    adapters: Tree | None = None,
  ) -> jax.Array:
    """The backbone stream of one task that changes it.

    Args:
      z: (b, n + 1, d).
      attention: see `regimes`; neither "frozen" nor "masked".
      memory: (l, m, d), or (1, m, d) where it is propagated.
      memory_norm: see `TaskSpec`; of memory that is dropped after attention.
      adapters: see `adapt`; stacked over layers, {"attention", "mlp"}.

    Returns:
      (b, d), the class token.
    """
    z = self.posembed_input(z, is_class=False)
    tokens = z.shape[1]
    for i, block in enumerate(self.encoderblock):
      cells = None
      if attention == "memory":
        cells = block.keys_values(memory[i][None], jnp.array([memory_norm]))
      elif attention in ("propagated", "additive") and i == 0:
        carried = jnp.broadcast_to(memory[0], (z.shape[0], *memory.shape[1:]))
        z = jnp.concatenate([z, carried.astype(z.dtype)], axis=1)
      elif attention == "additive":
        z = z.at[:, tokens:].add(memory[i].astype(z.dtype))
      own = None if adapters is None else jax.tree.map(lambda a, i=i: a[i],
                                                       adapters)  # fmt: skip
      z, _ = block(z, cells=cells, adapters=own)
    return self.encoder_norm(z)[:, 0]

  def keys_values(self, memory: jax.Array, norm: jax.Array) -> Context:
    """Keys and values of memory (l, t, m, d) in every layer, (t, h, m, k)."""
    return tuple(
      block.keys_values(memory[i], norm)
      for i, block in enumerate(self.encoderblock)
    )

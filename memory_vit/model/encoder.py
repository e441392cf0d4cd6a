"""The encoder: one set of weights, called on two streams.

  backbone stream  x (b, n + 1, d): the plain ViT; nothing else is ever in its
                   sequence.
  task stream      c (b, t, d): one token per task. It queries the keys and
                   values of the backbone stream, of the tasks that it may see,
                   and of the memory that it may see.

The modules are named as in the published checkpoints, so that the parameter
tree is the published one.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from memory_vit.model.attention import KeysValues, MultiHeadDotProductAttention
from memory_vit.model.masks import View
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig

# Keys and values of every layer; of the backbone stream, all that a task sees
# of a picture.
Context = tuple[KeysValues, ...]

_EPSILON = 1e-6  # of every LayerNorm in the published checkpoints


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
    norms: Tree | None = None,
  ) -> tuple[jax.Array, KeysValues]:
    """Arguments and results as in `MultiHeadDotProductAttention`, un-normed.

    `adapters` come after attention and after the MLP, each on its way to the
    residual stream. `norms` are what tasks add to the two LayerNorms, (2, t, d)
    each, see `retune`.
    """
    first, second = _rows(norms, 2)
    mixed, keys_values = self.MultiHeadDotProductAttention_0(
      retune(first, z, self.LayerNorm_0(z)), context, cells, view
    )
    z = z + (adapt(adapters["attention"], mixed) if adapters else mixed)
    y = self.MlpBlock_0(retune(second, z, self.LayerNorm_1(z)))
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


def retune(own: Tree | None, z: jax.Array, normed: jax.Array) -> jax.Array:
  """A LayerNorm with a scale and bias that tasks have changed for themselves.

  Args:
    own: {"scale": (t, d), "bias": (t, d)}, added to those of the LayerNorm;
      None where no task has any.
    z: (b, t, d), what is normalised.
    normed: (b, t, d), what the LayerNorm made of it.
  """
  if own is None:
    return normed
  values = z.astype(jnp.float32)
  values = values - values.mean(-1, keepdims=True)
  variance = jnp.square(values).mean(-1, keepdims=True)
  values = values * jax.lax.rsqrt(variance + _EPSILON) * own["scale"]
  return normed + (values + own["bias"]).astype(normed.dtype)


def _rows(norms: Tree | None, count: int) -> list[Tree | None]:
  """Takes the arrays of a tree apart along their first axis."""
  if norms is None:
    return [None] * count
  return [jax.tree.map(lambda a, i=i: a[i], norms) for i in range(count)]


def _layer_norm(config: ViTConfig) -> nn.LayerNorm:
  return nn.LayerNorm(epsilon=_EPSILON, dtype=config.dtype)


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
    self.encoder_norm = nn.LayerNorm(epsilon=_EPSILON, dtype=jnp.float32)

  def __call__(
    self,
    z: jax.Array,
    context: Context | None = None,
    cells: Context | None = None,
    view: View | None = None,
    norms: Tree | None = None,
  ) -> tuple[jax.Array, Context]:
    """Runs one stream.

    Args:
      z: (b, n + 1, d) backbone stream, or (b, t, d) task stream.
      context: None on the backbone stream; its result on the task stream.
      cells: from `keys_values`, on the task stream.
      view: who sees whom, on the task stream.
      norms: what tasks add to the 2 l + 1 LayerNorms, {"scale", "bias"} of
        (2 l + 1, t, d) each, see `retune`; None where no task has any.

    Returns:
      (b, s, d), and the keys and values of `z` in every layer.
    """
    is_task = context is not None
    z = self.posembed_input(z, is_class=is_task)
    keys_values = []
    for i, block in enumerate(self.encoderblock):
      if is_task:
        own = jax.tree.map(lambda a, i=i: a[2 * i : 2 * i + 2], norms)
        z, kv = block(z, context[i], cells[i], view, norms=own)
      else:
        z, kv = block(z)
      keys_values.append(kv)
    last = jax.tree.map(lambda a: a[-1], norms)
    return retune(last, z, self.encoder_norm(z)), tuple(keys_values)

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

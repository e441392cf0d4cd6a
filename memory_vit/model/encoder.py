"""ViT encoder: one set of weights, called on two streams.

  backbone stream  x (b, s, d): class tokens, registers, patches; the plain ViT,
                   whose sequence contains no tokens of masked tasks.
  task stream      c (b, t, d): one token per task. It attends to the keys and
                   values of the backbone stream, and of the tasks and memory
                   that the task mask allows.

Modules are named as in published checkpoints, so that parameter trees match.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from memory_vit.model import trees
from memory_vit.model.attention import (
  Attended,
  MultiHeadDotProductAttention,
  for_each_image,
)
from memory_vit.model.context import CellKeysValues, Cells, Context, KeysValues
from memory_vit.model.layer_norms import layer_norm
from memory_vit.model.parts import PassHooks
from memory_vit.model.parts.adapters import bottleneck_adapter
from memory_vit.model.products import Dense
from memory_vit.model.rope import Rotation, rotation
from memory_vit.model.stacking import SlotArrays
from memory_vit.model.trees import AnyArray, Tree
from memory_vit.model.vit_config import ViTConfig


class MlpBlock(nn.Module):
  """The MLP of a block, for tokens of either stream."""

  config: ViTConfig

  @nn.compact
  def __call__(self, z: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    cfg = self.config
    width, hidden = (cfg.width,), (cfg.mlp_dim,)
    y = Dense(width, hidden, cfg.precision, name="Dense_0")(z)
    if cfg.mlp == "swiglu":
      gate = Dense(width, hidden, cfg.precision, name="gate")(z)
      y = nn.silu(gate) * y
    else:
      y = gelu(y, cfg.gelu)
    return Dense(hidden, width, cfg.precision, name="Dense_1")(y)


def gelu(z: Float[Array, "b s d"], kind: str) -> Float[Array, "b s d"]:
  """Apply a GELU; `kind` is a value of `ViTConfig.gelu`."""
  if kind == "quick":
    return z * nn.sigmoid(1.702 * z)
  return nn.gelu(z, approximate=kind == "tanh")


class EncoderBlock(nn.Module):
  """A pre-norm block, on the tokens of either stream."""

  config: ViTConfig

  def setup(self) -> None:
    """Declare the submodules, under their published names."""
    cfg = self.config
    self.LayerNorm_0 = layer_norm(cfg)
    self.MultiHeadDotProductAttention_0 = MultiHeadDotProductAttention(cfg)
    self.LayerNorm_1 = layer_norm(cfg)
    self.MlpBlock_0 = MlpBlock(cfg)

  def encode(
    self, x: Float[Array, "b s d"], angles: Rotation | None
  ) -> tuple[Float[Array, "b s d"], KeysValues]:
    """Run the block on the backbone stream; also return keys and values."""
    attention = self.MultiHeadDotProductAttention_0
    mixed, keys_values = attention.encode(self.LayerNorm_0(x), angles)
    x = self._kept(x + mixed)
    return self._kept(x + self.MlpBlock_0(self.LayerNorm_1(x))), keys_values

  def read(
    self,
    c: Float[Array, "b t d"],
    attended: Attended,
    parts: Sequence[PassHooks],
    layer: int,
  ) -> Float[Array, "b t d"]:
    """Run the block on the task stream, with the hooks of the tasks' parts."""
    normed = _normed(parts, 2 * layer, c, self.LayerNorm_0(c))
    c = c + self.MultiHeadDotProductAttention_0.read(normed, attended)
    normed = _normed(parts, 2 * layer + 1, c, self.LayerNorm_1(c))
    return c + self.MlpBlock_0(normed)

  def fine_tuned(
    self,
    x: Float[Array, "b s d"],
    angles: Rotation | None,
    cells: CellKeysValues | None,
    adapters: Tree | None,
  ) -> Float[Array, "b s d"]:
    """Run the block with one task's memory cells and adapters, if any."""
    adapters = adapters or {"attention": None, "mlp": None}
    attention = self.MultiHeadDotProductAttention_0
    mixed, _ = attention.encode(self.LayerNorm_0(x), angles, cells)
    precision = self.config.precision
    x = self._kept(
      x + bottleneck_adapter(adapters["attention"], mixed, precision)
    )
    y = self.MlpBlock_0(self.LayerNorm_1(x))
    return self._kept(x + bottleneck_adapter(adapters["mlp"], y, precision))

  def _kept(self, x: Float32[Array, "b s d"]) -> Float[Array, "b s d"]:
    """Round backbone tokens to the compute dtype, as vit_jax does."""
    # On TPUs, this rounding halves the memory traffic of the tokens. On GPUs,
    # it has no effect, because XLA removes it.
    return x.astype(self.config.dtype)

  def keys_values(
    self, memory: Float[AnyArray, "t m d"], norm: Bool[AnyArray, " t"]
  ) -> CellKeysValues:
    """Return keys and values of memory, the same for all images."""
    # In the paper (Figure 2), cells pass through the first LayerNorm. They have
    # no queries, MLP or residual: only this block's attention uses them.
    normed = jnp.where(norm[:, None, None], self.LayerNorm_0(memory), memory)
    return self.MultiHeadDotProductAttention_0.keys_values(normed)


def _normed(
  parts: Sequence[PassHooks],
  i: int,
  c: Float[Array, "b t d"],
  z: Float[Array, "b t d"],
) -> Float[Array, "b t d"]:
  """Pass `z`, the output of LayerNorm `i` for tokens `c`, through all hooks."""
  for part in parts:
    z = part.after_norm(i, c, z)
  return z


class AddPositionEmbedding(nn.Module):
  """Learned position embeddings; the first rows belong to class tokens."""

  config: ViTConfig

  @nn.compact
  def __call__(
    self, z: Float[Array, "b s d"], is_class: bool
  ) -> Float[Array, "b s d"]:
    """Return `z` (task tokens if `is_class`) plus position embeddings."""
    cfg = self.config
    if cfg.positions != "learned":
      return z
    embedding = self.param(
      "pos_embedding",
      nn.initializers.normal(0.02),
      (1, cfg.class_tokens + cfg.num_patches, cfg.width),
    )
    if is_class and not cfg.class_tokens:
      return z
    # The class tokens of all tasks have position 0 (Figure 3 of the paper).
    embedding = embedding[:, :1] if is_class else embedding
    # A task's class token gets no position if the backbone has no class token.
    extra = 0 if is_class else z.shape[1] - embedding.shape[1]
    embedding = jnp.pad(embedding, ((0, 0), (extra, 0), (0, 0)))
    return z + embedding


class Encoder(nn.Module):
  """Positions, registers, l blocks and the last LayerNorm, on either stream."""

  config: ViTConfig

  def setup(self) -> None:
    """Declare submodules; flax names the blocks `encoderblock_0`, ..."""
    cfg = self.config
    self.posembed_input = AddPositionEmbedding(cfg)
    if cfg.pre_norm:
      self.pre_norm = layer_norm(cfg)
    self.encoderblock = [EncoderBlock(cfg) for _ in range(cfg.depth)]
    self.encoder_norm = layer_norm(cfg)

  def encode(
    self,
    x: Float[Array, "b _ d"],
    registers: Float[AnyArray, "1 _ d"] | None,
  ) -> tuple[list[Float[Array, "b s d"]], Context]:
    """Run the plain ViT without its last LayerNorm; registers get no position.

    Returns the tokens after each block, and the context.
    """
    x = self._tokens(x, registers)
    angles = self._angles(x.shape[1])
    states, context = [], []
    for block in self.encoderblock:
      x, keys_values = block.encode(x, angles)
      states.append(x)
      context.append(keys_values)
    return states, Context(tuple(context))

  def _tokens(
    self,
    x: Float[Array, "b _ d"],
    registers: Float[AnyArray, "1 _ d"] | None,
  ) -> Float[Array, "b s d"]:
    """Return `x` plus position embeddings, with registers before patches."""
    x = self.posembed_input(x, is_class=False)
    if registers is not None:
      first = x.shape[1] - self.config.num_patches
      registers = for_each_image(registers[0], x)
      x = jnp.concatenate([x[:, :first], registers, x[:, first:]], axis=1)
    return self.pre_norm(x) if self.config.pre_norm else x

  def _angles(self, tokens: int, behind: int = 0) -> Rotation | None:
    """Return the `Rotation` of a sequence of tokens; None without RoPE.

    `tokens` is the length of the sequence, and `behind` is the number of its
    tokens after the patches.
    """
    before = tokens - behind - self.config.num_patches
    return rotation(self.config, before, behind)

  def read(
    self,
    slots: SlotArrays,
    context: Context,
    seen: Bool[AnyArray, "l t m"] | None = None,
  ) -> Float32[Array, "b t d"]:
    """Run the task stream up to the heads, with only the `seen` cells."""
    keys = context.layers[0][0]
    token, cells = slots.parts["cls"], slots.parts["memory"]
    c = self.posembed_input(for_each_image(token, keys), is_class=True)
    c = self.pre_norm(c) if self.config.pre_norm else c
    parts = slots.hooks(self.config, self._angles(tokens=keys.shape[2]))
    states = []
    for i, block in enumerate(self.encoderblock):
      mask = slots.stream_mask
      if seen is not None:
        mask = mask._replace(cells=mask.cells & seen[i])
      keys_values = context.layers[i]
      terms = [t for p in parts for t in p.attention_terms(i, *keys_values)]
      attended = Attended(keys_values, cells[i], mask, terms)
      c = block.read(c, attended, parts, i)
      states.append(c)
    z = _normed(parts, 2 * self.config.depth, c, self.encoder_norm(c))
    for part in parts:
      z = part.read_out(states, z)
    return z

  def fine_tuned(
    self,
    x: Float[Array, "b _ d"],
    registers: Float[AnyArray, "1 _ d"] | None,
    *,
    attention: str,
    memory: Float[AnyArray, "_ m d"] | None = None,
    memory_norm: bool = True,
    adapters: Tree | None = None,
  ) -> Float[Array, "b s d"]:
    """Run the blocks on a backbone stream that one task changes."""
    x = self._tokens(x, registers)
    tokens = x.shape[1]
    angles = self._angles(tokens)
    layers = trees.unstack(adapters) if adapters else [None] * self.config.depth
    for i, block in enumerate(self.encoderblock):
      cells = None
      if memory is None:
        pass  # the regime has no cells
      elif attention == "memory":
        cells = block.keys_values(memory[i][None], jnp.array([memory_norm]))
      elif attention in ("propagated", "additive") and i == 0:
        # Append memory once; it stays in `x` through all layers.
        carried = for_each_image(memory[0], x)
        x = jnp.concatenate([x, carried], axis=1)
        angles = self._angles(x.shape[1], behind=x.shape[1] - tokens)
      elif attention == "additive":
        x = x.at[:, tokens:].add(memory[i].astype(x.dtype))
      x = block.fine_tuned(x, angles, cells, layers[i])
    return x

  def keys_values(
    self, memory: Float[AnyArray, "l t m d"], norm: Bool[AnyArray, " t"]
  ) -> Cells:
    """Return keys and values of memory in all layers."""
    return tuple(
      block.keys_values(cells, norm)
      for block, cells in zip(
        self.encoderblock, trees.unstack(memory), strict=True
      )
    )

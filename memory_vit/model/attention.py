"""Multi-head attention with one set of weights, for both streams."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from memory_vit.model.context import CellKeysValues, KeysValues, TaskKeysValues
from memory_vit.model.masks import TaskMask
from memory_vit.model.parts.part import AttentionTerm
from memory_vit.model.products import Dense, einsum
from memory_vit.model.rope import Rotation, rotate
from memory_vit.model.trees import AnyArray
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime.dtypes import Precision

# Names under which modules sow attention weights; see attention_weights.py.
SOWN_BY_TASKS = "task_attention_weights"
SOWN_BY_BACKBONE = "attention_weights"  # the name that flax uses


class Attended(NamedTuple):
  """Keys and values that task tokens attend to in one layer."""

  context: KeysValues
  cells: CellKeysValues
  mask: TaskMask
  terms: Sequence[AttentionTerm]


def _heads_first(a: Float[Array, "b s h k"]) -> Float[Array, "b h s k"]:
  """Return `a` with heads before tokens: caches are read head by head."""
  return jnp.swapaxes(a, -3, -2)


class MultiHeadDotProductAttention(nn.Module):
  """Attention of backbone tokens and task tokens, with shared projections."""

  config: ViTConfig

  def setup(self) -> None:
    """Declare the projections, which several methods share."""
    cfg = self.config
    width, heads = (cfg.width,), (cfg.num_heads, cfg.head_dim)
    self.query = Dense(width, heads, cfg.precision)
    self.key = Dense(width, heads, cfg.precision)
    self.value = Dense(width, heads, cfg.precision)
    self.out = Dense(heads, width, cfg.precision)

  def encode(
    self,
    z: Float[Array, "b s d"],
    angles: Rotation | None,
    cells: CellKeysValues | None = None,
  ) -> tuple[Float[Array, "b s d"], KeysValues]:
    """Run self-attention of the backbone; also return `z`'s keys and values."""
    q, k = rotate(self.query(z), angles), rotate(self.key(z), angles)
    v = self.value(z)
    keys_values = self._handed_on(k), self._handed_on(v)
    if cells is not None:
      k, v = _with_cells(k, cells[0]), _with_cells(v, cells[1])
    return self.out(self._attend(q, k, v, module=self)), keys_values

  def read(
    self, c: Float[Array, "b t d"], attended: Attended
  ) -> Float[Array, "b t d"]:
    """Run attention of the tasks' class tokens, after their LayerNorm."""
    query, keys_values = _heads_first(self.query(c)), self.keys_values(c)
    mixed = attend_from_tasks(
      query, keys_values, attended, self.config.precision, module=self
    )
    return self.out(_heads_first(mixed))

  def pool(
    self, probe: Float[Array, "b 1 d"], x: Float[Array, "b s d"]
  ) -> Float[Array, "b 1 d"]:
    """Run attention of a probe to all tokens."""
    q, k, v = self.query(probe), self.key(x), self.value(x)
    return self.out(self._attend(q, k, v))

  def keys_values(self, z: Float[Array, "b s d"]) -> KeysValues:
    """Return keys and values of normed tokens (b, s, d) or memory (t, m, d)."""
    return self._handed_on(self.key(z)), self._handed_on(self.value(z))

  def _handed_on(self, a: Float[Array, "b s h k"]) -> Float[Array, "b h s k"]:
    """Return `a` as caches hold it: heads before tokens, in compute dtype."""
    return _heads_first(a.astype(self.config.dtype))

  def _attend(
    self,
    q: Float32[Array, "b q h k"],
    k: Float32[Array, "b s h k"],
    v: Float32[Array, "b s h k"],
    module: nn.Module | None = None,
  ) -> Float32[Array, "b q h k"]:
    """Return Flax's dot-product attention, computed with `products.einsum`."""

    def product(
      spec: str, x: Float[Array, "..."], y: Float[Array, "..."]
    ) -> Float32[Array, "..."]:
      return einsum(spec.replace("...", "b"), x, y, self.config.precision)

    return nn.dot_product_attention(
      q,
      k,
      v,
      module=module,
      qk_attn_weights_einsum=product,
      attn_weights_value_einsum=product,
    )


def for_each_image(
  a: Shaped[AnyArray, "..."], batch: Shaped[Array, "b ..."]
) -> Shaped[Array, "b ..."]:
  """Repeat `a` for every image, on the device that holds the image."""
  # jnp.broadcast_to would put all copies on every device of an explicit mesh.
  return jax.vmap(lambda _: jnp.asarray(a))(batch)


def _with_cells(
  a: Float32[Array, "b s h k"], cells: Float[Array, "1 h m k"]
) -> Float32[Array, "b s+m h k"]:
  """Append keys (or values) of memory cells to those of each image's tokens."""
  cells = for_each_image(_heads_first(cells)[0], a)
  return jnp.concatenate([a, cells], axis=1)


def attend_from_tasks(
  query: Float[Array, "b h t k"],
  own: TaskKeysValues,
  attended: Attended,
  precision: Precision,
  module: nn.Module | None = None,
) -> Float32[Array, "b h t k"]:
  """Run attention of task tokens: one softmax over image, tasks and cells."""
  context, cells, mask, terms = attended
  tokens = [_with_parents(a, mask.parents, axis=2) for a in own]
  memory = [_with_parents(a, mask.parents, axis=0) for a in cells]
  sees_token, sees_cell = _masks(mask.parents, mask.is_parent, mask.cells)

  query = query / math.sqrt(query.shape[-1])
  product = functools.partial(einsum, precision=precision)
  to_cells = _with_memory("bhtk,tphmk->bhtpm", query, memory[0], precision)
  to_context = product("bhtk,bhsk->bhts", query, context[0])
  for term in terms:
    to_context = to_context + term.scores(query, precision)
  parts = [
    to_context,
    _hide(product("bhtk,bhtpk->bhtp", query, tokens[0]), sees_token),
    _hide(to_cells, sees_cell).reshape(
      *query.shape[:3], math.prod(to_cells.shape[3:])
    ),
  ]
  ends = [parts[0].shape[-1], parts[0].shape[-1] + parts[1].shape[-1]]
  weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1))
  if module is not None:
    # Axis 3 of `weights`: s image tokens, 1 + p task tokens, (1 + p) * m cells.
    module.sow("intermediates", SOWN_BY_TASKS, weights)
  to_context, to_tokens, to_cells_ = jnp.split(weights, ends, axis=-1)
  read = product("bhts,bhsk->bhtk", to_context, context[1])
  for term in terms:
    read = read + term.values(to_context, precision)
  to_cells = to_cells_.reshape(to_cells.shape)
  return (
    read
    + product("bhtp,bhtpk->bhtk", to_tokens, tokens[1])
    + _with_memory("bhtpm,tphmk->bhtk", to_cells, memory[1], precision)
  )


def _with_memory(
  spec: str,
  a: Float[Array, "b h t ..."],
  memory: Float[AnyArray, "t p h m k"],
  precision: Precision,
) -> Float32[Array, "b h t ..."]:
  """Return `einsum` of `a` and `memory`, the keys or values of memory cells."""
  if precision.dtype == "float32":
    return einsum(spec, a, memory, precision)
  # In bfloat16, swap the operands: if `memory` came second, XLA for GPUs would
  # transpose it in every layer. In float32, a swap would change results.
  inputs, out = spec.split("->")
  first, second = inputs.split(",")
  return einsum(f"{second},{first}->{out}", memory, a, precision)


def _with_parents(
  a: Shaped[AnyArray, "..."], parents: Int[AnyArray, "t p"], axis: int
) -> Shaped[Array, "..."]:
  """Return for each task its entry of `a`, followed by its parents' entries."""
  itself = jnp.expand_dims(a, axis + 1)
  if not parents.shape[1]:  # OpenVINO fails on empty gathers
    return itself
  # The loss of a task never trains its parents.
  read = jnp.take(jax.lax.stop_gradient(a), parents, axis=axis)
  return jnp.concatenate([itself, read], axis + 1)


def _masks(
  parents: Int[AnyArray, "t p"],
  is_parent: Bool[AnyArray, "t p"],
  has_cell: Bool[AnyArray, "t m"],
) -> tuple[Bool[Array, "t 1+p"], Bool[Array, "t 1+p m"]]:
  """Return what each task sees: a mask of task tokens, and a mask of cells."""
  itself = jnp.ones((parents.shape[0], 1), bool)
  sees_token = jnp.concatenate([itself, is_parent], axis=1)
  has_cell = _with_parents(has_cell, parents, axis=0)
  return sees_token, sees_token[:, :, None] & has_cell


def _hide(
  scores: Float[Array, "b h *seen"], seen: Bool[Array, "*seen"]
) -> Float[Array, "b h *seen"]:
  """Return `scores`, with -inf where `seen` is False."""
  return jnp.where(seen[None, None], scores, -jnp.inf)

"""Side stream: a narrow network over the patches, for one masked task.

Not the paper's. It takes the cached keys and values of every layer, mixes
neighboring patches, and is added, widened, to the keys and values that the
task's token attends to. Only that token attends to it: the backbone is
unchanged, and nothing more is cached. Kin: ladder side-tuning (Sung et al.
2022), Res-Tuning-Bypass (Jiang et al. 2023), LoSA (Mercea et al. 2024).

In layer l, for every token of the backbone stream, with LN a LayerNorm of the
stream's own and std one without parameters:

  s += [std(K_l); std(V_l)] A + a
  s += depthwise 3 x 3 convolution of LN(s), on the grid of patches
  s += W2 gelu(W1 LN(s) + b1) + b2
  K_l + std(s) Bk, V_l + std(s) Bv   is what the task's token attends to

Without mixing it is K_l + s Bk, V_l + s Bv with s = [std(K_l); std(V_l)] A + a:
nothing is carried from layer to layer. Bk and Bv start at zero. K_l and V_l are
standardized, as their sizes differ several times between backbones, and the
stream sums them over all layers.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from memory_vit.model.products import einsum
from memory_vit.model.regimes import SideKind, side_shapes
from memory_vit.model.rope import Rotation, rotate
from memory_vit.model.trees import AnyArray, Tree
from memory_vit.model.vit_config import ViTConfig

_EPSILON = 1e-6


class SideGroup(NamedTuple):
  """Side streams of one width and mixing, in slots of their own."""

  # Of `regimes.side_shapes`, (l, g, ...); zeros where no task is.
  params: Tree
  # The slot of each stream's task; any where no task is.
  places: Int32[AnyArray, " g"]
  # The stream of each slot; any where it has none of this group.
  stream: Int32[AnyArray, " t"]
  has_stream: Bool[AnyArray, " t"]


# {"conv16": the group of the streams of width 16 that mix by convolution}
SideGroups = Mapping[str, SideGroup]


class SideView(NamedTuple):
  """Stream tokens that a group of tasks attends to beside keys and values."""

  tokens: Float32[Array, "g b s r"]
  # {"keys", "values"}, which widen the tokens.
  up: Mapping[str, Float[AnyArray, "g r d"]]
  group: SideGroup


def side_kind(params: Tree) -> SideKind:
  width = params["down"]["bias"].shape[-1]
  return SideKind(width, "conv" if "conv" in params else "none")


def group_streams(
  tasks: Sequence[Tree],
  slots: int,
  counts: Mapping[SideKind, int],
  *,
  xp: ModuleType = jnp,
) -> dict[str, SideGroup]:
  """Group side streams of tasks; `counts` is the least number of each kind."""
  places: dict[SideKind, list[int]] = {kind: [] for kind in counts}
  for i, task in enumerate(tasks):
    if "side" in task:
      places.setdefault(side_kind(task["side"]), []).append(i)
  depth, _, width = tasks[0]["memory"].shape
  groups = {}
  for kind, members in sorted(places.items()):
    size = max(len(members), counts.get(kind, 0))
    shapes = side_shapes(width, depth, kind)
    none = jax.tree.map(
      lambda shape: xp.zeros(shape, np.float32), shapes, is_leaf=_is_shape
    )
    each = [tasks[i]["side"] for i in members] + [none] * (size - len(members))
    stream, has_stream = np.zeros(slots, np.int32), np.zeros(slots, bool)
    stream[members], has_stream[members] = np.arange(len(members)), True
    groups[f"{kind.mixing}{kind.width}"] = SideGroup(
      params=jax.tree.map(lambda *a: xp.stack(a, 1), *each),
      places=np.array(members + [0] * (size - len(members)), np.int32),
      stream=stream,
      has_stream=has_stream,
    )
  return groups


def _is_shape(node: Any) -> bool:
  return isinstance(node, tuple)


class SideStreams:
  """The streams of all groups, on their way through the layers."""

  def __init__(
    self, groups: SideGroups, config: ViTConfig, angles: Rotation | None
  ) -> None:
    self._groups, self._config = groups, config
    self._angles = angles and (angles[0], -angles[1])
    self._states: dict[str, Float32[Array, "g b s r"]] = {}

  def advance(
    self,
    layer: int,
    keys: Float[Array, "b h s k"],
    values: Float[Array, "b h s k"],
  ) -> list[SideView]:
    """Pass a layer, given its keys and values of the backbone stream."""
    if not self._groups:
      return []
    # Before their rotation: a patch looks alike wherever it stands.
    keys = rotate(jnp.swapaxes(keys, 1, 2).astype(jnp.float32), self._angles)
    values = jnp.swapaxes(values, 1, 2).astype(jnp.float32)
    shape = (*keys.shape[:2], self._config.width)
    keys = _standardized(keys.reshape(shape))
    values = _standardized(values.reshape(shape))
    views = []
    for name, group in self._groups.items():
      params = jax.tree.map(lambda a: a[layer], group.params)
      state = _down(params["down"], keys, values, self._config.dtype)
      read = state
      if "conv" in params:
        if layer:
          state = state + self._states[name]
        state = state + _convolved(params, state, self._config)
        state = state + _mlp(params, state, self._config.dtype)
        self._states[name], read = state, _standardized(state)
      views.append(SideView(read, params["up"], group))
    return views


def _down(
  params: Tree,
  keys: Float32[Array, "b s d"],
  values: Float32[Array, "b s d"],
  dtype: str,
) -> Float32[Array, "g b s r"]:
  """Standardized keys and values of all tokens, narrowed."""
  kernel = params["kernel"]
  d = keys.shape[-1]
  narrow = einsum("bsd,gdr->gbsr", keys, kernel[:, :d], dtype) + einsum(
    "bsd,gdr->gbsr", values, kernel[:, d:], dtype
  )
  return narrow + params["bias"][:, None, None]


def _convolved(
  params: Tree, state: Float32[Array, "g b s r"], config: ViTConfig
) -> Float32[Array, "g b s r"]:
  """The convolution over patches; zeros for the tokens before them."""
  n = config.num_patches
  side = config.image_size // config.patch_size
  normed = _layer_norm(params["conv_norm"], state[:, :, -n:])
  g, b, _, r = normed.shape
  # Nine shifted products, which XLA fuses into one pass over the patches.
  grid = jnp.pad(
    normed.reshape(g, b, side, side, r),
    ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)),
  )
  mixed = sum(
    grid[:, :, i : i + side, j : j + side]
    * params["conv"][:, i, j][:, None, None, None]
    for i in range(3)
    for j in range(3)
  )
  before = state.shape[2] - n
  return jnp.pad(
    mixed.reshape(g, b, n, r), ((0, 0), (0, 0), (before, 0), (0, 0))
  )


def _mlp(
  params: Tree, state: Float32[Array, "g b s r"], dtype: str
) -> Float32[Array, "g b s r"]:
  normed = _layer_norm(params["mlp_norm"], state)
  hidden = _dense(params["mlp"]["Dense_0"], normed, dtype)
  return _dense(params["mlp"]["Dense_1"], jax.nn.gelu(hidden), dtype)


def _dense(
  params: Tree, z: Float32[Array, "g b s _"], dtype: str
) -> Float32[Array, "g b s _"]:
  y = einsum("gbsr,grf->gbsf", z, params["kernel"], dtype)
  return y + params["bias"][:, None, None]


def _layer_norm(
  params: Tree, z: Float32[Array, "g b s r"]
) -> Float32[Array, "g b s r"]:
  scale, bias = (params[k][:, None, None] for k in ("scale", "bias"))
  return _standardized(z) * scale + bias


def _standardized(z: Float32[Array, "..."]) -> Float32[Array, "..."]:
  values = z - z.mean(-1, keepdims=True)
  variance = jnp.square(values).mean(-1, keepdims=True)
  return values * jax.lax.rsqrt(variance + _EPSILON)


def added_scores(
  view: SideView, query: Float[Array, "b h t k"], dtype: str
) -> Float32[Array, "b h t s"]:
  """Scores of a group's side streams, as of widened keys; zeros for others."""
  # Queries are narrowed instead of keys widened, which are never made.
  h, k = query.shape[1], query.shape[3]
  keys = view.up["keys"].reshape(*view.up["keys"].shape[:2], h, k)
  own = jnp.take(query, view.group.places, axis=2)
  narrow = einsum("bhgk,grhk->bhgr", own, keys, dtype)
  return _to_slots(
    einsum("bhgr,gbsr->bhgs", narrow, view.tokens, dtype), view.group
  )


def added_values(
  view: SideView, weights: Float32[Array, "b h t s"], dtype: str
) -> Float32[Array, "b h t k"]:
  """Values that a group's tokens get from side streams; zeros for others."""
  g, r, d = view.up["values"].shape
  h = weights.shape[1]
  values = view.up["values"].reshape(g, r, h, d // h)
  own = jnp.take(weights, view.group.places, axis=2)
  narrow = einsum("bhgs,gbsr->bhgr", own, view.tokens, dtype)
  return _to_slots(einsum("bhgr,grhk->bhgk", narrow, values, dtype), view.group)


def _to_slots(
  a: Float32[Array, "b h g _"], group: SideGroup
) -> Float32[Array, "b h t _"]:
  """Give each slot what its stream has; zeros without a stream."""
  # Not multiplied by 0: another stream may not be finite.
  of_slots = jnp.take(a, group.stream, axis=2)
  return jnp.where(group.has_stream[None, None, :, None], of_slots, 0.0)

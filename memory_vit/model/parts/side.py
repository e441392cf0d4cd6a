"""Side stream: a narrow network over the patches, for one masked task.

Not in the paper. It reads the cached keys and values of every layer and mixes
neighboring patches; its projected output is added to the keys and values that
the task's token attends to. The backbone does not attend to the stream, so
backbone and cache are unchanged. Similar to ladder side-tuning (Sung et al.
2022), Res-Tuning-Bypass (Jiang et al. 2023) and LoSA (Mercea et al. 2024).

In layer l, for every token of the backbone stream, where LN is a LayerNorm of
the side stream, and std a LayerNorm without parameters:

  s += [std(K_l); std(V_l)] A + a
  s += depthwise 3 x 3 convolution of LN(s), on the grid of patches
  s += W2 gelu(W1 LN(s) + b1) + b2
  the task's token attends to K_l + std(s) Bk, V_l + std(s) Bv

Without mixing, the token attends to K_l + s Bk, V_l + s Bv, where s =
[std(K_l); std(V_l)] A + a is computed anew in each layer. Bk and Bv start at
zero. K_l and V_l are standardized, because their sizes differ several-fold
between backbones, and the stream sums them over all layers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epy

from memory_vit.model.parts.part import (
  AttentionTerm,
  Axes,
  InitialValues,
  Part,
  PassHooks,
  normal,
  round_up,
  too_small,
  zeros,
)
from memory_vit.runtime.dtypes import Precision

with epy.lazy_imports():
  import flax.linen as nn
  import jax
  import jax.numpy as jnp
  import jaxtyping as jt
  import numpy as np

  from memory_vit.model import depthwise, layer_norms, products, rope, trees

if TYPE_CHECKING:
  from memory_vit.model.task import TaskSpec
  from memory_vit.model.vit_config import ViTConfig

# Values of `TaskSpec.side_mixing`: how a side stream mixes patches.
SIDE_MIXING = ("conv", "none")
_EPSILON = 1e-6


class SideKind(NamedTuple):
  """Width and mixing of a side stream; streams of the same kind are batched."""

  width: int
  mixing: str


NO_SIDE = SideKind(0, "")
# (kind, number of side streams of this kind) for each kind in a pass.
Room = tuple[tuple[SideKind, int], ...]


class SideStream(Part):
  """A side stream whose output starts at zero."""

  name = "side"
  listed = True
  fields = ("side_width", "side_mixing")

  def size(self, spec: TaskSpec) -> SideKind:
    return spec.side

  def shapes(self, size: SideKind, axes: Axes) -> Any:
    d, l = axes.width, axes.depth
    r = size.width
    read = {
      "down": {"kernel": (l, 2 * d, r), "bias": (l, r)},
      "up": {"keys": (l, r, d), "values": (l, r, d)},
    }
    if size.mixing == "none":
      return read
    norm = {"scale": (l, r), "bias": (l, r)}
    return {
      **read,
      "conv_norm": norm,
      "conv": (l, 3, 3, r),
      "mlp_norm": norm,
      "mlp": {
        "Dense_0": {"kernel": (l, r, 2 * r), "bias": (l, 2 * r)},
        "Dense_1": {"kernel": (l, 2 * r, r), "bias": (l, r)},
      },
    }

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    params = zeros(shapes)
    down, conv, first, second = jax.random.split(key, 4)
    kernel = shapes["down"]["kernel"].shape
    params["down"]["kernel"] = normal(down, kernel, kernel[1] ** -0.5)
    if "conv" not in shapes:
      return params
    params["conv"] = normal(conv, shapes["conv"].shape, 1.0) / 3
    for norm in ("conv_norm", "mlp_norm"):
      params[norm]["scale"] = params[norm]["scale"] + 1.0
    lecun = nn.initializers.lecun_normal(batch_axis=0)
    for name, subkey in (("Dense_0", first), ("Dense_1", second)):
      layer = params["mlp"][name]
      layer["kernel"] = lecun(subkey, layer["kernel"].shape)
    return params

  def problem(self, spec: TaskSpec) -> str:
    if spec.side_mixing in SIDE_MIXING:
      return too_small(spec, "side_width", 1)
    return (
      f"side_mixing is {spec.side_mixing!r}, expected one of "
      f"{', '.join(SIDE_MIXING)}"
    )

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    return [("side stream", f"width {spec.side_width}, {spec.side_mixing}")]

  def cost(self, options: Any) -> tuple[int, ...]:
    return options.side_width, options.side_mixing == "conv"

  def room(self, specs: Sequence[TaskSpec]) -> Room:
    return tuple(sorted(collections.Counter(map(self.size, specs)).items()))

  def grown(self, room: Room | None, needed: Room) -> Room:
    most = dict(room or ())
    for kind, count in needed:
      most[kind] = max(most.get(kind, 0), round_up(count))
    return tuple(sorted(most.items()))

  def stack(
    self,
    params: Mapping[int, Any],
    slots: int,
    room: Room,
    axes: Axes,
    xp: ModuleType,
  ) -> dict[str, SideGroup]:
    """Stack the streams of each kind in `room`; return {kind: group}."""
    groups = {}
    for kind, count in room:
      places = [i for i in sorted(params) if _kind(params[i]) == kind]
      members = {g: params[i] for g, i in enumerate(places)}
      stream, has_stream = np.zeros(slots, np.int32), np.zeros(slots, bool)
      stream[places], has_stream[places] = np.arange(len(places)), True
      groups[f"{kind.mixing}{kind.width}"] = SideGroup(
        params=super().stack(members, count, kind, axes, xp),
        places=np.array(places + [0] * (count - len(places)), np.int32),
        stream=stream,
        has_stream=has_stream,
      )
    return groups

  def hooks(
    self, stacked: SideGroups, config: ViTConfig, angles: rope.Rotation | None
  ) -> PassHooks:
    return SideStreams(stacked, config, angles)


def _kind(params: trees.Tree) -> SideKind:
  width = params["down"]["bias"].shape[-1]
  return SideKind(width, "conv" if "conv" in params else "none")


class SideGroup(NamedTuple):
  """Stacked side streams of one width and mixing."""

  # Arrays (l, g, ...) as in `SideStream.shapes`; zeros for unused streams.
  params: trees.Tree
  # For each stream, the slot of its task; arbitrary for unused streams.
  places: jt.Int32[trees.AnyArray, " g"]
  # For each slot, the stream of its task; arbitrary if `has_stream` is False.
  stream: jt.Int32[trees.AnyArray, " t"]
  has_stream: jt.Bool[trees.AnyArray, " t"]


# For example {"conv16": group of all streams of width 16 with convolutions}.
SideGroups = Mapping[str, SideGroup]


class SideStreams(PassHooks):
  """The side streams of all groups in one pass, with their current states."""

  def __init__(
    self, groups: SideGroups, config: ViTConfig, angles: rope.Rotation | None
  ) -> None:
    self._groups, self._config = groups, config
    self._layers = {
      name: trees.unstack(group.params) for name, group in groups.items()
    }
    self._angles = angles and (angles[0], -angles[1])
    self._states: dict[str, jt.Float32[jax.Array, "g b s r"]] = {}

  def attention_terms(
    self,
    layer: int,
    keys: jt.Float[jax.Array, "b h s k"],
    values: jt.Float[jax.Array, "b h s k"],
  ) -> list[SideTerm]:
    """Run one layer of all streams; return a term for each group."""
    # Undo RoPE, which makes the keys of equal patches differ by position.
    keys, values = (
      jnp.swapaxes(a, 1, 2).astype(jnp.float32) for a in (keys, values)
    )
    keys = rope.rotate(keys, self._angles)
    terms = []
    for name, group in self._groups.items():
      params = self._layers[name][layer]
      state = _down(params["down"], keys, values, self._config.precision)
      tokens = state
      if "conv" in params:
        if layer:
          state = state + self._states[name]
        state = state + _convolved(params, state, self._config)
        state = state + _mlp(params, state, self._config.precision)
        self._states[name], tokens = state, _standardized(state)
      terms.append(SideTerm(tokens, params["up"], group))
    return terms


def _down(
  params: trees.Tree,
  keys: jt.Float32[jax.Array, "b s h k"],
  values: jt.Float32[jax.Array, "b s h k"],
  precision: Precision,
) -> jt.Float32[jax.Array, "g b s r"]:
  """Standardize keys and values, project both to width r, and add them."""
  key_kernel, value_kernel = jnp.split(params["kernel"], 2, axis=1)
  narrow = _narrowed(keys, key_kernel, precision)
  narrow += _narrowed(values, value_kernel, precision)
  return narrow + params["bias"][:, None, None]


def _narrowed(
  z: jt.Float32[jax.Array, "b s h k"],
  kernel: jt.Float32[trees.AnyArray, "g d r"],
  precision: Precision,
) -> jt.Float32[jax.Array, "g b s r"]:
  """Standardize the tokens `z`, and return their products with `kernel`."""
  (b, s, h, k), (g, d, r) = z.shape, kernel.shape
  product = functools.partial(products.einsum, precision=precision)
  if precision.dtype == "float32" or not precision.on_tpu:
    return product("bsd,gdr->gbsr", _standardized(z.reshape(b, s, d)), kernel)
  # On TPUs, standardize the products instead of the tokens, because that is
  # three times as fast. GPUs standardize the tokens (see above), because the
  # means and variances computed below would take more memory.
  kernel = jnp.asarray(kernel, precision.dtype)
  columns = jnp.concatenate([kernel, jnp.ones_like(kernel[..., :1])], axis=2)
  narrow = product("bshk,ghkr->gbsr", z, columns.reshape(g, h, k, r + 1))
  mean = narrow[..., r:] / d
  # Use 8 equal columns: with a single column, XLA would compute a sum instead
  # of a matrix product.
  ones = jnp.ones((h, k, 8), kernel.dtype)
  squares = product("bshk,hkr->bsr", jnp.square(z), ones)[None, ..., :1] / d
  variance = jnp.maximum(squares - jnp.square(mean), 0)
  sums = kernel.astype(jnp.float32).sum(axis=1)[:, None, None]
  scale = jax.lax.rsqrt(variance + _EPSILON)
  return scale * (narrow[..., :r] - mean * sums)


def _convolved(
  params: trees.Tree, state: jt.Float32[jax.Array, "g b s r"], config: ViTConfig
) -> jt.Float32[jax.Array, "g b s r"]:
  """Return zeros for class tokens and registers, then the convolved patches."""
  n = config.num_patches
  side = config.image_size // config.patch_size
  normed = _layer_norm(params["conv_norm"], state[:, :, -n:])
  g, b, _, r = normed.shape
  grid = normed.reshape(g, b, side, side, r)
  mixed = depthwise.convolve(grid, params["conv"]).reshape(normed.shape)
  before = state.shape[2] - n
  return jnp.pad(mixed, ((0, 0), (0, 0), (before, 0), (0, 0)))


def _mlp(
  params: trees.Tree,
  state: jt.Float32[jax.Array, "g b s r"],
  precision: Precision,
) -> jt.Float32[jax.Array, "g b s r"]:
  normed = _layer_norm(params["mlp_norm"], state)
  hidden = _dense(params["mlp"]["Dense_0"], normed, precision)
  return _dense(params["mlp"]["Dense_1"], jax.nn.gelu(hidden), precision)


def _dense(
  params: trees.Tree, z: jt.Float32[jax.Array, "g b s _"], precision: Precision
) -> jt.Float32[jax.Array, "g b s _"]:
  y = products.einsum("gbsr,grf->gbsf", z, params["kernel"], precision)
  return y + params["bias"][:, None, None]


def _layer_norm(
  params: trees.Tree, z: jt.Float32[jax.Array, "g b s r"]
) -> jt.Float32[jax.Array, "g b s r"]:
  scale, bias = (params[k][:, None, None] for k in ("scale", "bias"))
  return _standardized(z) * scale + bias


def _standardized(
  z: jt.Float32[jax.Array, "*b d"],
) -> jt.Float32[jax.Array, "*b d"]:
  return layer_norms.standardized(z, _EPSILON)


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared by ==
class SideTerm(AttentionTerm):
  """Term that a group of streams adds to the attention of its tasks."""

  tokens: jt.Float32[jax.Array, "g b s r"]
  # Projections {"keys", "values"} from side width r to backbone width d.
  up: Mapping[str, jt.Float[trees.AnyArray, "g r d"]]
  group: SideGroup

  def scores(
    self, query: jt.Float[jax.Array, "b h t k"], precision: Precision
  ) -> jt.Float32[jax.Array, "b h t s"]:
    """Return scores of stream tokens; zeros for tasks of other groups."""
    # Project queries to width r, so that no keys of width d are computed.
    h, k = query.shape[1], query.shape[3]
    keys = self.up["keys"].reshape(*self.up["keys"].shape[:2], h, k)
    queries = _to_streams(query, self.group)
    narrow = products.einsum("gbhk,grhk->gbhr", queries, keys, precision)
    scores = products.einsum("gbhr,gbsr->gbhs", narrow, self.tokens, precision)
    return _to_slots(scores, self.group)

  def values(
    self, weights: jt.Float32[jax.Array, "b h t s"], precision: Precision
  ) -> jt.Float32[jax.Array, "b h t k"]:
    """Return weighted sums of values; zeros for tasks of other groups."""
    g, r, d = self.up["values"].shape
    h = weights.shape[1]
    values = self.up["values"].reshape(g, r, h, d // h)
    shares = _to_streams(weights, self.group)
    narrow = products.einsum("gbhs,gbsr->gbhr", shares, self.tokens, precision)
    sums = products.einsum("gbhr,grhk->gbhk", narrow, values, precision)
    return _to_slots(sums, self.group)


def _to_streams(
  a: jt.Float32[jax.Array, "b h t _"], group: SideGroup
) -> jt.Float32[jax.Array, "g b h _"]:
  """Take the entry of each stream's task from axis t of `a`."""
  # Transpose `a` instead of the stream tokens, which are larger.
  return jnp.take(jnp.moveaxis(a, 2, 0), group.places, axis=0)


def _to_slots(
  a: jt.Float32[jax.Array, "g b h _"], group: SideGroup
) -> jt.Float32[jax.Array, "b h t _"]:
  """Return, for each slot, the entry of `a` for the slot's stream.

  A slot without a stream gets zeros.
  """
  # A slot without a stream takes an arbitrary entry, which may be NaN or
  # infinite: replace this entry, because multiplying it by 0 would give NaN.
  of_slots = jnp.moveaxis(jnp.take(a, group.stream, axis=0), 0, 2)
  return jnp.where(group.has_stream[None, None, :, None], of_slots, 0.0)

"""Norms: LayerNorms for the token of one task; not in the paper."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.model.parts.part import Axes, Part, PassHooks

with epy.lazy_imports():
  import jax
  import jaxtyping as jt

  from memory_vit.model import layer_norms, trees

if TYPE_CHECKING:
  from memory_vit.model.rope import Rotation
  from memory_vit.model.vit_config import ViTConfig


class Norms(Part):
  """Additions to scale and bias of every LayerNorm, initialized to zero."""

  name = "norms"
  listed = True

  def shapes(self, size: None, axes: Axes) -> Any:
    # Every block has two LayerNorms; one more follows the last block.
    norms = (2 * axes.depth + 1, axes.width)
    return {"scale": norms, "bias": norms}

  def hooks(
    self, stacked: Any, config: ViTConfig, angles: Rotation | None
  ) -> PassHooks:
    return _NormsHooks(trees.unstack(stacked), config.layer_norm_epsilon)


@dataclasses.dataclass(frozen=True)
class _NormsHooks(PassHooks):
  norms: list[Any]  # {"scale": (t, d), "bias": (t, d)} of each LayerNorm
  epsilon: float

  def after_norm(
    self,
    i: int,
    c: jt.Float[jax.Array, "b t d"],
    z: jt.Float[jax.Array, "b t d"],
  ) -> jt.Float[jax.Array, "b t d"]:
    scale, bias = (self.norms[i][key][None] for key in ("scale", "bias"))
    return z + (layer_norms.standardized(c, self.epsilon) * scale + bias)

"""Layers: the head of a task uses the task token after every block.

Not in the paper. The token after each block is standardized, multiplied by a
vector of that layer, and added to the output of the last LayerNorm. Similar to
Head2Toe (Evci et al. 2022), VQT (Tu et al. 2023) and SynQT (2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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


class Layers(Part):
  """A vector for each layer, initialized to zero."""

  name = "layers"
  listed = True

  def shapes(self, size: None, axes: Axes) -> Any:
    return (axes.depth, axes.width)

  def hooks(
    self, stacked: Any, config: ViTConfig, angles: Rotation | None
  ) -> PassHooks:
    return _LayersHooks(stacked, config.layer_norm_epsilon)


@dataclasses.dataclass(frozen=True)
class _LayersHooks(PassHooks):
  weights: jt.Float[trees.AnyArray, "l t d"]
  epsilon: float

  def read_out(
    self,
    states: Sequence[jt.Float[jax.Array, "b t d"]],
    features: jt.Float32[jax.Array, "b t d"],
  ) -> jt.Float32[jax.Array, "b t d"]:
    for weight, state in zip(self.weights, states, strict=True):
      added = layer_norms.standardized(state, self.epsilon) * weight[None]
      features = features + added
    return features

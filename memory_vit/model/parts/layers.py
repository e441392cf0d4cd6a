"""Layers: the token after every block is read by the head of a task.

The token after each block, standardized and times a vector of that layer, is
added to the output of the last LayerNorm. Kin: Head2Toe (Evci et al. 2022), VQT
(Tu et al. 2023), SynQT (2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etils import epy
from jaxtyping import Float, Float32

from memory_vit.model.parts.part import Axes, InPass, Part

with epy.lazy_imports():
  import jax

  from memory_vit.model import layer_norms, trees

if TYPE_CHECKING:
  from memory_vit.model.rope import Rotation
  from memory_vit.model.vit_config import ViTConfig


class Layers(Part):
  """A vector for each layer; zero at first."""

  name = "layers"
  listed = True

  def shapes(self, size: None, axes: Axes) -> Any:
    return (axes.depth, axes.width)

  def in_pass(
    self, stacked: Any, config: ViTConfig, angles: Rotation | None
  ) -> InPass:
    return _LayersInPass(stacked, config.layer_norm_epsilon)


@dataclasses.dataclass(frozen=True)
class _LayersInPass(InPass):
  weights: Float[trees.AnyArray, "l t d"]
  epsilon: float

  def read_out(
    self,
    states: Sequence[Float[jax.Array, "b t d"]],
    features: Float32[jax.Array, "b t d"],
  ) -> Float32[jax.Array, "b t d"]:
    for weight, state in zip(self.weights, states, strict=True):
      added = layer_norms.standardized(state, self.epsilon) * weight[None]
      features = features + added
    return features

"""Class token: the token of a task in the task stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.model.parts.part import Axes, InitialValues, Part, normal

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import jaxtyping as jt

if TYPE_CHECKING:
  from memory_vit.model.backbone import Backbone


class ClassToken(Part):
  """One token: the input of the task stream."""

  name = "cls"
  listed = in_every = True
  axis = 0

  def shapes(self, size: None, axes: Axes) -> Any:
    return (axes.width,)

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    return normal(key, shapes.shape, 0.02)

  def on_backbone(
    self, params: Any, backbone: Backbone, start: InitialValues
  ) -> Any:
    pretrained = start.cls_init == "pretrained"
    return first_class_token(backbone) if pretrained else params


def first_class_token(backbone: Backbone) -> jt.Float32[jax.Array, " d"]:
  """Return the initial class token of a new task."""
  params, config = backbone.params, backbone.config
  if config.class_tokens:
    return jnp.array(params["cls"][0, 0])
  if config.pooling == "map":
    return jnp.array(params["MAPHead_0"]["probe"][0, 0])
  # For mean pooling, return the token of a mid-grey patch at the mean position:
  # blocks treat a class token of this value like the patches that are averaged.
  token = jnp.array(params["embedding"]["bias"])
  if config.positions == "learned":
    positions = params["Transformer"]["posembed_input"]["pos_embedding"]
    token = token + jnp.array(positions)[0].mean(axis=0)
  return token

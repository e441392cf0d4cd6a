"""Head: a linear layer from the features of a task to its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.model.parts.part import Axes, Part

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import jaxtyping as jt

  from memory_vit.model import trees

if TYPE_CHECKING:
  from memory_vit.model.task import TaskSpec


class Head(Part):
  """A kernel and a bias, initialized to zero as in vit_jax.

  A random head would send arbitrary gradients to class token and memory. From a
  zero head, they get no gradient in the first step.
  """

  name = "head"
  in_every, unit = True, 128
  lengths = {"width": "head/kernel"}
  axis = 0

  def size(self, spec: TaskSpec) -> int:
    return spec.num_classes

  def shapes(self, size: int, axes: Axes) -> Any:
    return {"kernel": (axes.width, size), "bias": (size,)}


def head_logits(
  features: jt.Float[jax.Array, "b d"], head: Mapping[str, trees.AnyArray]
) -> jt.Float32[jax.Array, "b c"]:
  """Return logits of a linear head, {"kernel": (d, c), "bias": (c,)}."""
  return features.astype(jnp.float32) @ head["kernel"] + head["bias"][None]


def pooled_logits(
  pooled: jt.Float32[jax.Array, "b d"], heads: Mapping[str, trees.AnyArray]
) -> jt.Float32[jax.Array, "b t c"]:
  """Return logits of stacked heads on the same features, by one product."""
  logits = jnp.einsum("bd,dtc->btc", pooled, heads["kernel"])
  return logits + heads["bias"][None]


def stacked_logits(
  features: jt.Float32[jax.Array, "b t d"], heads: Mapping[str, trees.AnyArray]
) -> jt.Float32[jax.Array, "b t c"]:
  """Return logits of stacked heads, each on the features of its task."""
  logits = jnp.einsum("btd,tdc->btc", features, heads["kernel"])
  return logits + heads["bias"][None]

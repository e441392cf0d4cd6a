"""Bottleneck adapters after attention and MLP (Houlsby et al. 2019).

Adapters are not in the paper. They change what the backbone computes, so a task
with adapters cannot share a pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.model.parts.part import (
  Axes,
  InitialValues,
  Part,
  too_small,
  zeros,
)
from memory_vit.runtime.dtypes import Precision

with epy.lazy_imports():
  import flax.linen as nn
  import jax
  import jaxtyping as jt

  from memory_vit.model import products, trees

if TYPE_CHECKING:
  from memory_vit.model.task import TaskSpec


class Adapters(Part):
  """Adapters in every layer; each adapter starts as the identity."""

  name = "adapters"
  fields = ("bottleneck",)
  lengths = {"depth": "adapters/attention/down/bias"}

  def size(self, spec: TaskSpec) -> int:
    return spec.bottleneck

  def shapes(self, size: int, axes: Axes) -> Any:
    d, l = axes.width, axes.depth
    adapter = {
      "down": {"kernel": (l, d, size), "bias": (l, size)},
      "up": {"kernel": (l, size, d), "bias": (l, d)},
    }
    return {"attention": adapter, "mlp": adapter}

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    down = nn.initializers.lecun_normal(batch_axis=0)
    attention, mlp = jax.random.split(key)
    params = zeros(shapes)
    for name, subkey in (("attention", attention), ("mlp", mlp)):
      kernel = shapes[name]["down"]["kernel"].shape
      params[name]["down"]["kernel"] = down(subkey, kernel)
    return params

  def problem(self, spec: TaskSpec) -> str:
    return too_small(spec, "bottleneck", 1)

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    return [("bottleneck", f"width {spec.bottleneck}")]


def bottleneck_adapter(
  params: trees.Tree | None,
  y: jt.Float32[jax.Array, "b s d"],
  precision: Precision,
) -> jt.Float32[jax.Array, "b s d"]:
  """Apply an adapter with its residual; return `y` if `params` is None."""
  if params is None:
    return y
  down, up = params["down"], params["up"]
  hidden = products.einsum("bsd,dr->bsr", y, down["kernel"], precision)
  hidden = nn.gelu(hidden + down["bias"][None, None])
  added = products.einsum("bsr,rd->bsd", hidden, up["kernel"], precision)
  return y + added + up["bias"][None, None]

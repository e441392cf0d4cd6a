"""Probe: attention over all layers of a frozen backbone.

Not in the paper. A probe attends to the backbone's class token and mean patch
after each block. Its task has no class token, and trains on about 40 KB per
image (ViT-B in bfloat16). Similar to attentive layer fusion (2026); queries are
learned, and keys are not projected, as in efficient probing (2026).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.model.parts.part import (
  Axes,
  InitialValues,
  Part,
  too_small,
  zeros,
)

with epy.lazy_imports():
  import flax.linen as nn
  import jax
  import jax.numpy as jnp
  import jaxtyping as jt

  from memory_vit.model import trees

if TYPE_CHECKING:
  from memory_vit.model.task import TaskSpec

# Number of learned queries; each computes an equal share of the features.
PROBE_QUERIES = 8


class Probe(Part):
  """A probe that starts as the mean of all tokens."""

  name = "probe"
  fields = ("bottleneck",)
  lengths = {"summary": "probe/scale"}

  def size(self, spec: TaskSpec) -> int:
    return spec.bottleneck

  def shapes(self, size: int, axes: Axes) -> Any:
    d, n = axes.width, axes.summary
    return {
      "query": (PROBE_QUERIES, d),
      "bias": (PROBE_QUERIES, n),
      "scale": (n, d),
      "down": (n, d, size),
      "up": (n, size, d),
    }

  def init(self, key: jax.Array, shapes: Any, start: InitialValues) -> Any:
    params = zeros(shapes)
    params["scale"] = params["scale"] + 1.0
    down = nn.initializers.lecun_normal(batch_axis=0)
    return {**params, "down": down(key, shapes["down"].shape)}

  def problem(self, spec: TaskSpec) -> str:
    return too_small(spec, "bottleneck", 1)

  def rows(self, spec: TaskSpec) -> list[tuple[str, str]]:
    return [("bottleneck", f"width {spec.bottleneck}")]


def probe_features(
  params: Mapping[str, trees.AnyArray], summary: jt.Float32[jax.Array, "b n d"]
) -> jt.Float32[jax.Array, "b d"]:
  """Attend to the summary of all layers of a frozen backbone.

  Args:
    params: for scores, "query" (q, d) and "bias" (q, n); for values, "scale"
      (n, d), "down" (n, d, r) and "up" (n, r, d). The value of token i is
      token * scale[i] + token @ down[i] @ up[i].
    summary: from `MemoryViT.summarize`.

  Returns:
    Features for a head.
  """
  d = summary.shape[-1]
  scores = jnp.einsum("bnd,qd->bqn", summary, params["query"]) / math.sqrt(d)
  weights = jax.nn.softmax(scores + params["bias"][None])
  weights = jnp.repeat(weights, -(-d // PROBE_QUERIES), axis=1)[:, :d]
  hidden = jnp.einsum("bnd,ndr->bnr", summary, params["down"])
  values = summary * params["scale"][None]
  values = values + jnp.einsum("bnr,nrd->bnd", hidden, params["up"])
  return jnp.einsum("bdn,bnd->bd", weights, values)

"""A probe: attention over what every layer of a frozen backbone says.

Its tokens are those of `VisionTransformer.summarize`, the class token and the
mean patch after each block, so it needs no class token of its own, and learns
from some kilobytes an image. Attention over such tokens is that of attentive
layer fusion (2026); queries are learned and read without a projection to keys,
as in efficient probing (2026).
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from memory_vit.model.regimes import PROBE_QUERIES
from memory_vit.model.trees import AnyArray


def probe_features(
  params: Mapping[str, AnyArray], summary: Float32[Array, "b n d"]
) -> Float32[Array, "b d"]:
  """Attend to the tokens of all layers.

  Args:
    params: "query" (q, d) and "bias" (q, n), of the scores; "scale" (n, d),
      "down" (n, d, r) and "up" (n, r, d), of the values: each token times its
      scale, and what a bottleneck of its own adds.
    summary: from `VisionTransformer.summarize`.

  Returns:
    What a head reads.
  """
  d = summary.shape[-1]
  scores = jnp.einsum("bnd,qd->bqn", summary, params["query"]) / math.sqrt(d)
  weights = jax.nn.softmax(scores + params["bias"][None])
  # The share of a feature is that of its query.
  weights = jnp.repeat(weights, -(-d // PROBE_QUERIES), axis=1)[:, :d]
  hidden = jnp.einsum("bnd,ndr->bnr", summary, params["down"])
  values = summary * params["scale"][None]
  values = values + jnp.einsum("bnr,nrd->bnd", hidden, params["up"])
  return jnp.einsum("bdn,bnd->bd", weights, values)

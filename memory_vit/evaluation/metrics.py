"""Metrics as sums over examples, so that every example counts exactly once."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Float64, Int, Int8

from memory_vit.model.trees import AnyArray

# Sums over the examples of a split, as `batch_sums` names them.
Totals = dict[str, Float64[np.ndarray, ""] | Float64[np.ndarray, " c"]]


def batch_sums(
  logits: Float[Array, "b c"],
  labels: Int[Array, " b"],
  mask: Float32[Array, " b"],
) -> dict[str, Float32[Array, ""] | Float32[Array, " c"]]:
  """Sum over the examples of a batch.

  Args:
    logits: outputs of the model.
    labels: classes.
    mask: 1 for an example and 0 for padding.

  Returns:
    Sums "count", "loss" (cross-entropy, nats), "top1" and "top5", and over the
    examples of each class "class_count", "class_top1", (c,). "not_finite"
    counts examples whose logits are not all finite: no class of them is right.
  """
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  best = top_classes(logits, 5)[1]
  # Of logits that are no numbers the first would be the best.
  finite = jnp.isfinite(logits).all(axis=-1)
  hits = (best == labels[:, None]) * (mask * finite)[:, None]
  classes = jax.nn.one_hot(labels, logits.shape[-1]) * mask[:, None]
  top1 = hits[:, 0]
  return {
    "count": mask.sum(),
    "loss": (loss * mask).sum(),
    "top1": top1.sum(),
    "top5": hits.sum(),
    "not_finite": (mask * ~finite).sum(),
    "class_count": classes.sum(0),
    "class_top1": (classes * top1[:, None]).sum(0),
  }


def example_hits(
  logits: Float[Array, "b c"],
  labels: Int[Array, " b"],
  mask: Float32[Array, " b"],
) -> Int8[Array, " b"]:
  """1 for an example that is right, 0 for a wrong one, -1 where it is none.

  The arguments are those of `batch_sums`, and so is what "top1" counts.
  """
  best = top_classes(logits, 1)[1][:, 0]
  right = (best == labels) & jnp.isfinite(logits).all(axis=-1)
  return jnp.where(mask > 0, right, -1).astype(jnp.int8)


def top_classes(
  logits: Float[Array, "b c"], count: int
) -> tuple[Float[Array, "b _"], Int[Array, "b _"]]:
  """The largest logits and their classes, or all; of equal ones the first.

  `top_k` alone puts -0.0 behind 0.0.
  """
  logits = jnp.where(logits == 0, 0.0, logits)
  best, classes = jax.lax.top_k(logits, min(count, logits.shape[-1]))
  return best, classes


def add(
  total: Totals | None,
  sums: Mapping[str, Float32[AnyArray, ""] | Float32[AnyArray, " c"]],
) -> Totals:
  """Add the sums of a batch to a total, in float64 on the host."""
  added: Totals = {k: np.asarray(v, np.float64) for k, v in sums.items()}
  if total is None:
    return added
  return {k: np.asarray(total[k] + added[k]) for k in added}


def summarise(total: Totals) -> dict[str, Any]:
  """Return "loss", "top1", "top5", "majority", and what they stand on.

  That is "examples", how many of them are "not_finite", and "per_class". "top1"
  and "top5" are shares of the examples, and so is "majority": that of the
  largest class, which is what who always names it gets right. "loss" is not
  finite where that of an example is not. A class without an example has None in
  "per_class".
  """
  count = float(total["count"])
  per_class = [
    float(hits / seen) if seen else None
    for hits, seen in zip(
      total["class_top1"], total["class_count"], strict=True
    )
  ]
  return {
    "loss": float(total["loss"]) / count,
    "top1": float(total["top1"]) / count,
    "top5": float(total["top5"]) / count,
    "majority": float(total["class_count"].max()) / count,
    "examples": int(count),
    "not_finite": int(total["not_finite"]),
    "per_class": per_class,
  }


def tells_top5(result: Mapping[str, Any]) -> bool:
  """Whether a "top5" that stands beside a "per_class" is not always 1."""
  return len(result["per_class"]) > 5

"""Metrics as sums over examples, so that every example counts exactly once."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Float64, Int, Int8

from memory_vit.kinds.scores import Evaluation, Scores
from memory_vit.model.trees import AnyArray

# Sums over the examples of a split, as `batch_sums` names them.
Totals = dict[str, Float64[np.ndarray, ""] | Float64[np.ndarray, " c"]]
# What outputs that are not finite mean for the metrics, by kind of task.
NOT_FINITE = {
  "classes": "they count as mistakes, and there is no loss",
  "labels": "no label is predicted for them, and there is no loss",
  "values": "there are no metrics",
}


def batch_sums(
  logits: Float[Array, "b c"],
  labels: Int[Array, " b"],
  mask: Float32[Array, " b"],
) -> dict[str, Float32[Array, ""] | Float32[Array, " c"]]:
  """Sum over the examples of a batch; `mask` is 1 for them, 0 for padding.

  "count", "loss" (cross-entropy, nats), "top1" and "top5", and over the
  examples of each class "class_count", "class_top1", (c,). "not_finite" counts
  examples whose logits are not all finite: no class of them is right, and the
  loss is NaN.
  """
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  best = top_classes(logits, 5)[1]
  # Of NaN logits the first would be the best.
  finite = jnp.isfinite(logits).all(axis=-1)
  # With -inf for a wrong class it would be finite.
  loss = jnp.where(finite, loss, jnp.nan)
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
  """1 for an example that "top1" counts, 0 for others, -1 for padding."""
  best = top_classes(logits, 1)[1][:, 0]
  right = (best == labels) & jnp.isfinite(logits).all(axis=-1)
  return jnp.where(mask > 0, right, -1).astype(jnp.int8)


def top_classes(
  logits: Float[Array, "b c"], count: int
) -> tuple[Float[Array, "b _"], Int[Array, "b _"]]:
  """The largest logits and their classes; of equal ones the first."""
  # `top_k` puts -0.0 behind 0.0.
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


def evaluation_of(total: Totals) -> Evaluation:
  """Scores of a split of which all examples were added."""
  count = float(total["count"])
  top1 = float(total["top1"]) / count
  return Evaluation(
    scores=Scores(
      score=top1,
      loss=finite(float(total["loss"]) / count),
      metrics={"top1": top1, "top5": float(total["top5"]) / count},
      per_output={
        "accuracy": [
          float(hits / seen) if seen else None
          for hits, seen in zip(
            total["class_top1"], total["class_count"], strict=True
          )
        ]
      },
      examples=int(count),
      not_finite=int(total["not_finite"]),
    ),
    majority=float(total["class_count"].max()) / count,
  )


def finite(number: float | None) -> float | None:
  """JSON has no NaN and no infinity."""
  return number if number is not None and math.isfinite(number) else None


def defined_mean(values: np.ndarray) -> float | None:
  """Mean of the values that are not NaN; None if there are none."""
  defined = values[~np.isnan(values)]
  return float(defined.mean()) if defined.size else None

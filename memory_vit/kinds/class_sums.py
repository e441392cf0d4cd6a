"""Metrics as sums over examples, so that every example counts exactly once."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Float64, Int, Int8

from memory_vit.kinds.calibration import BINS
from memory_vit.kinds.kind import Batch, HeldOut
from memory_vit.kinds.predictions import TOP, SplitPredictions
from memory_vit.kinds.scores import (
  Also,
  Evaluation,
  Rejection,
  Scores,
  finite,
)
from memory_vit.kinds.state import State
from memory_vit.kinds.task_kind import TaskKind
from memory_vit.runtime import sharding

# Maximum number of logits kept in RAM to fit a temperature and a threshold.
# A `ClassState` with more logits drops every second example.
MOST_HELD_OUT = 2**27
# Sums over the examples of a split, with the keys of `batch_sums`.
Totals = dict[str, Float64[np.ndarray, "..."]]


def batch_sums(
  logits: Float[Array, "b c"],
  labels: Int[Array, " b"],
  mask: Float32[Array, " b"],
  temperature: Any = 1.0,
  unknown: Any = -np.inf,
) -> dict[str, Float32[Array, "..."]]:
  """Sum over the examples of a batch; `mask` is 1 for examples, 0 for padding.

  The keys are "count", "loss" (cross-entropy, nats), "top1" and "top5" (hits).
  "class_count" and "class_top1" (c,) are sums over the examples of each class.
  "not_finite" counts examples whose logits are not all finite: they have no
  hits, and the loss is NaN. "bins" (2, k) are sums of confidence and of hits
  in each bin of `calibration`. "accepted" counts examples whose largest logit
  is at least `unknown`; "accepted_top1" counts the hits among these examples.
  """
  scaled = _scaled(logits, temperature)
  loss = optax.softmax_cross_entropy_with_integer_labels(scaled, labels)
  largest, best = top_classes(logits, 5)
  # For NaN logits `top_k` returns the first classes, which must not be hits.
  finite = jnp.isfinite(logits).all(axis=-1)
  # If a wrong class has the logit -inf, the loss may be finite: set it to NaN.
  loss = jnp.where(finite, loss, jnp.nan)
  hits = (best == labels[:, None]) * (mask * finite)[:, None]
  classes = jax.nn.one_hot(labels, logits.shape[-1]) * mask[:, None]
  top1 = hits[:, 0]
  confidence = jnp.exp(-jax.nn.logsumexp(scaled, axis=-1))
  edges = jnp.linspace(0, 1, BINS + 1)[1:-1]
  bins = jax.nn.one_hot(jnp.searchsorted(edges, confidence), BINS)
  of_bins = jnp.stack([mask * confidence, top1])
  # Set NaN to 0 before multiplying by the one-hot `bins`: NaN times 0 is NaN.
  of_bins = jnp.where(finite[None], of_bins, 0)
  accepted = mask * finite * (largest[:, 0] >= unknown)
  return {
    "count": mask.sum(),
    "loss": (loss * mask).sum(),
    "top1": top1.sum(),
    "top5": hits.sum(),
    "not_finite": (mask * ~finite).sum(),
    "class_count": classes.sum(0),
    "class_top1": (classes * top1[:, None]).sum(0),
    "bins": (of_bins[:, :, None] * bins[None]).sum(1),
    "accepted": accepted.sum(),
    "accepted_top1": (accepted * top1).sum(),
  }


def example_hits(
  logits: Float[Array, "b c"],
  labels: Int[Array, " b"],
  mask: Float32[Array, " b"],
) -> Int8[Array, " b"]:
  """Return 1 for a top-1 hit, 0 for a mistake, -1 for padding."""
  best = top_classes(logits, 1)[1][:, 0]
  right = (best == labels) & jnp.isfinite(logits).all(axis=-1)
  return jnp.where(mask > 0, right, -1).astype(jnp.int8)


def predict_examples(
  logits: Float[Array, "b c"],
  labels: Int[Array, " b"],
  mask: Float32[Array, " b"],
  temperature: Any = 1.0,
) -> dict[str, Array]:
  """Return the arrays of `SplitPredictions` for a batch.

  The best classes are the same as for "top1" and "top5" of `batch_sums`.
  """
  logits = logits.astype(jnp.float32)
  scaled = _scaled(logits, temperature)
  largest, classes = top_classes(logits, TOP)
  best = jnp.take_along_axis(scaled, classes, axis=-1)
  total = jax.nn.logsumexp(scaled, axis=-1)
  of_label = jnp.take_along_axis(scaled, labels[:, None], axis=-1)[:, 0]
  shares = jnp.exp(scaled - total[:, None])
  return {
    "label": labels.astype(jnp.int32),
    "counted": mask > 0,
    "finite": jnp.isfinite(logits).all(axis=-1),
    "top_classes": classes.astype(jnp.int32),
    "top_probabilities": jnp.exp(best - total[:, None]),
    "loss": total - of_label,
    "known_score": largest[:, 0],
    "brier": (shares**2).sum(axis=-1) - 2 * jnp.exp(of_label - total) + 1,
  }


def _scaled(
  logits: Float[Array, "b c"], temperature: Any
) -> Float[Array, "b c"]:
  """Return (logits - largest logit of their row) / `temperature`."""
  return (logits - logits.max(axis=-1, keepdims=True)) / temperature


def top_classes(
  logits: Float[Array, "b c"], count: int
) -> tuple[Float[Array, "b _"], Int[Array, "b _"]]:
  """Return the largest logits and their classes, ties by class index."""
  # Turn -0.0 into 0.0: they are equal, but `top_k` ranks -0.0 below 0.0.
  logits = jnp.where(logits == 0, 0.0, logits)
  best, classes = jax.lax.top_k(logits, min(count, logits.shape[-1]))
  return best, classes


def add(
  total: Totals | None,
  sums: Mapping[str, Any],
) -> Totals:
  """Add the sums of a batch to a total, in float64 on the host."""
  added: Totals = {k: np.asarray(v, np.float64) for k, v in sums.items()}
  if total is None:
    return added
  return {k: np.asarray(total[k] + added[k]) for k in added}


def evaluation_of(total: Totals, *, rejects: bool = False) -> Evaluation:
  """Compute the scores of a split from the sums over all its examples."""
  count = float(total["count"])
  top1 = float(total["top1"]) / count
  confidence, hits = total["bins"]
  error = None
  if not total["not_finite"]:
    error = finite(float(np.abs(confidence - hits).sum()) / count)
  rejection = None
  if rejects:
    accepted = float(total["accepted"])
    rejection = Rejection(
      1 - accepted / count,
      float(total["accepted_top1"]) / accepted if accepted else None,
    )
  return Evaluation(
    scores=Scores(
      score=top1,
      loss=finite(float(total["loss"]) / count),
      metrics={
        "top1": top1,
        "top5": float(total["top5"]) / count,
        "calibration_error": error,
      },
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
    rejection=rejection,
    majority=float(total["class_count"].max()) / count,
  )


class ClassState(State):
  """Metric sums of a task of classes, and results per example if requested."""

  def __init__(
    self,
    stated: TaskKind,
    batch: Batch,
    mesh: jax.sharding.Mesh,
    also: Collection[Also],
  ) -> None:
    """Compute the sums of a batch; `Kind.state` describes the arguments."""
    on_all = sharding.replicated(mesh)
    temperature = np.float32(stated.temperature)
    self._unknown = stated.unknown
    cut = -np.inf if stated.unknown is None else stated.unknown
    sums = _compiled(batch_sums, on_all)
    self._total = add(None, sums(*batch, temperature, np.float32(cut)))
    self._rows: dict[str, list[Any]] = {}
    if "hits" in also:
      self._rows["hits"] = [_compiled(example_hits, on_all)(*batch)]
    if "predictions" in also:
      rows = _compiled(predict_examples, on_all)(*batch, temperature)
      self._rows |= {key: [array] for key, array in rows.items()}
    self._rows = jax.device_get(self._rows)
    self._held_out: list[HeldOut] = []
    self._step = 1  # `_held_out` has every `_step`-th example
    if "held_out" in also:
      outputs, targets, mask = sharding.to_host(tuple(batch))
      known = (mask > 0) & np.isfinite(outputs).all(axis=1)
      self._held_out = [
        HeldOut(outputs[known].astype(np.float32), targets[known])
      ]

  def merge(self, other: Self) -> Self:
    self._total = add(self._total, other._total)
    for key, batches in other._rows.items():
      self._rows[key] += batches
    self._held_out += [_every(self._step, batch) for batch in other._held_out]
    if sum(batch.outputs.size for batch in self._held_out) > MOST_HELD_OUT:
      self._step *= 2
      self._held_out = [_every(2, batch) for batch in self._held_out]
    return self

  def compute(self) -> Evaluation:
    rows = {key: np.concatenate(arrays) for key, arrays in self._rows.items()}
    hits = rows.pop("hits", None)
    classes = len(self._total["class_count"])
    predictions = None
    if rows:
      predictions = SplitPredictions(
        num_classes=classes, unknown_below=self._unknown, **rows
      )
    held_out = None
    if self._held_out:
      columns = zip(*self._held_out, strict=True)
      held_out = HeldOut(*map(np.concatenate, columns))
    return dataclasses.replace(
      evaluation_of(self._total, rejects=self._unknown is not None),
      hits=hits,
      predictions=predictions,
      held_out=held_out,
    )


def _every(step: int, rows: HeldOut) -> HeldOut:
  return HeldOut(*(column[::step] for column in rows))


@functools.cache
def _compiled(function: Callable[..., Any], on_all: Any) -> Callable[..., Any]:
  """Return a compiled function whose results are replicated on all devices."""
  return jax.jit(function, out_shardings=on_all)

"""Metrics of a task of labels: average precision, F1 and thresholds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import sklearn.metrics
from jaxtyping import Bool, Float64, Int64

from memory_vit.evaluation.calibration import Calibration, calibrate
from memory_vit.evaluation.metrics import defined_mean
from memory_vit.evaluation.split_predictions import LabelPredictions
from memory_vit.model.kinds import THRESHOLD


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class LabelMetrics:
  """Metrics of each of c labels.

  Attributes:
    support: the number of examples that have it.
    predicted: examples for which it is predicted.
    average_precision: area under the curve of precision and recall, in steps;
      NaN without `support`.
    precision: share of `predicted` that is right; NaN if there are none.
    recall: share of `support` that is found; NaN if there are none.
    f1: harmonic mean of both; NaN without `support` and `predicted`.
    threshold: the probability from which it is predicted, of the task.
    best_threshold: the one with the greatest F1 on these examples; 0.5 without
      `support`.
  """

  support: Int64[np.ndarray, " c"]
  predicted: Int64[np.ndarray, " c"]
  average_precision: Float64[np.ndarray, " c"]
  precision: Float64[np.ndarray, " c"]
  recall: Float64[np.ndarray, " c"]
  f1: Float64[np.ndarray, " c"]
  threshold: Float64[np.ndarray, " c"]
  best_threshold: Float64[np.ndarray, " c"]


def label_metrics(predictions: LabelPredictions) -> LabelMetrics:
  """Metrics of each label, by scikit-learn.

  No label is predicted for an example whose outputs are not finite.
  """
  cuts = predictions.kind.cut_offs(predictions.num_classes)
  predicted_labels = predictions.predicted_labels[predictions.counted]
  rows = []
  for i, cut in enumerate(cuts.tolist()):
    right, scores = _column(predictions, i)
    found = predicted_labels[:, i]
    precision, recall, f1, _ = sklearn.metrics.precision_recall_fscore_support(
      right, found, average="binary", zero_division=np.nan
    )
    average, best = np.nan, THRESHOLD
    if right.any():
      average = sklearn.metrics.average_precision_score(right, scores)
      best = _best_threshold(right, scores)
    rows.append(
      (right.sum(), found.sum(), average, precision, recall, f1, cut, best)
    )
  support, predicted, *others = np.array(rows, np.float64).T
  return LabelMetrics(
    support.astype(np.int64), predicted.astype(np.int64), *others
  )


def label_calibration(predictions: LabelPredictions) -> Calibration:
  """Calibration over all pairs of a finite example and a label.

  The confidence is the probability of the label, and the accuracy is the share
  of pairs that have the label.
  """
  rows = predictions.counted & predictions.finite
  return calibrate(
    predictions.probability[rows].ravel(), predictions.label[rows].ravel() > 0.5
  )


def curve(
  predictions: LabelPredictions, label: int
) -> tuple[Float64[np.ndarray, " k"], Float64[np.ndarray, " k"]]:
  """Precision and recall of a label at each threshold, recall decreasing."""
  precision, recall, _ = sklearn.metrics.precision_recall_curve(
    *_column(predictions, label)
  )
  return precision, recall


def summarise(
  predictions: LabelPredictions, found: LabelMetrics | None = None
) -> dict[str, Any]:
  """The entries of `evaluate` for a task of labels.

  "score" is "map", the mean over the labels that an example has; NaN if none
  has any. "loss" is NaN, and "calibration_error" None, if an output is not
  finite. "thresholds" are the `best_threshold` of `found`, the `label_metrics`.
  """
  found = found or label_metrics(predictions)
  counted = predictions.counted
  outputs = predictions.outputs[counted].astype(np.float64)
  finite = bool(np.isfinite(outputs).all())
  score = defined_mean(found.average_precision)
  return {
    "score": float("nan") if score is None else score,
    "map": score,
    "loss": _cross_entropy(outputs, predictions.label[counted])
    if finite
    else float("nan"),
    "f1_macro": defined_mean(found.f1),
    "per_class": _or_none(found.average_precision),
    "f1_per_class": _or_none(found.f1),
    "thresholds": found.best_threshold.tolist(),
    "calibration_error": label_calibration(predictions).expected_error
    if finite
    else None,
    "examples": int(counted.sum()),
    "not_finite": predictions.not_finite,
  }


def _column(
  predictions: LabelPredictions, label: int
) -> tuple[Bool[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
  """Whether each example that counts has the label, and its scores."""
  counted = predictions.counted
  right = predictions.label[counted, label] > 0.5
  return right, predictions.scores(label)[counted]


def _best_threshold(
  right: Bool[np.ndarray, " n"], scores: Float64[np.ndarray, " n"]
) -> float:
  """Half way down to the next score, as the last digit of one may vary."""
  precision, recall, thresholds = sklearn.metrics.precision_recall_curve(
    right, scores
  )
  total = precision + recall
  f1 = 2 * precision * recall / np.where(total > 0, total, 1)
  # The last point has no threshold, and below 0 are outputs that are no number.
  f1 = np.where(thresholds >= 0, f1[:-1], -1)
  best = int(f1.argmax())
  if f1[best] < 0:
    return THRESHOLD
  below = max(0.0, float(thresholds[best - 1])) if best else 0.0
  return (below + float(thresholds[best])) / 2


def _cross_entropy(outputs: np.ndarray, label: np.ndarray) -> float:
  return float((np.logaddexp(0, outputs) - label * outputs).mean())


def _or_none(values: Float64[np.ndarray, " c"]) -> list[float | None]:
  return [None if np.isnan(value) else value for value in values.tolist()]

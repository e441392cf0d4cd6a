"""Metrics of a task of labels: average precision, F1 and thresholds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import sklearn.metrics
from jaxtyping import Bool, Float64

from memory_vit.evaluation.calibration import Calibration, calibrate
from memory_vit.evaluation.classification import ClassMetrics
from memory_vit.evaluation.metrics import defined_mean
from memory_vit.evaluation.split_predictions import LabelPredictions
from memory_vit.model.kinds import THRESHOLD


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class LabelMetrics(ClassMetrics):
  """Metrics of each of c labels, those of classes and of thresholds.

  Attributes:
    average_precision: area under the curve of precision and recall, in steps;
      NaN without `support`.
    threshold: the probability from which a label is predicted, of the task.
    best_threshold: the one with the greatest F1 on these examples; 0.5 without
      `support`.
  """

  average_precision: Float64[np.ndarray, " c"]
  threshold: Float64[np.ndarray, " c"]
  best_threshold: Float64[np.ndarray, " c"]


def label_metrics(predictions: LabelPredictions) -> LabelMetrics:
  """Metrics of each label, by scikit-learn.

  No label is predicted for an example whose outputs are not finite.
  """
  right = predictions.label[predictions.counted] > 0.5
  found = predictions.predicted_labels[predictions.counted]
  support = right.sum(axis=0)
  average = np.full(predictions.num_classes, np.nan)
  best = np.full(predictions.num_classes, THRESHOLD)
  for i in np.flatnonzero(support).tolist():
    column = _column(predictions, i)
    average[i] = sklearn.metrics.average_precision_score(*column)
    best[i] = _best_threshold(*column)
  scores = [
    sklearn.metrics.precision_recall_fscore_support(
      *pair, average="binary", zero_division=np.nan
    )[:3]
    for pair in zip(right.T, found.T, strict=True)
  ]
  precision, recall, f1 = np.array(scores, np.float64).T
  return LabelMetrics(
    support=support,
    predicted=found.sum(axis=0),
    precision=precision,
    recall=recall,
    f1=f1,
    average_precision=average,
    threshold=predictions.kind.cut_offs(predictions.num_classes),
    best_threshold=best,
  )


def label_calibration(predictions: LabelPredictions) -> Calibration:
  """Calibration over all pairs of a finite example and a label.

  The confidence is the probability of the label, and the accuracy is the share
  of pairs that have the label.
  """
  rows = predictions.has_prediction
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
  loss, error = float("nan"), None
  if not predictions.not_finite:
    outputs = predictions.outputs[counted].astype(np.float64)
    # Binary cross-entropy.
    losses = np.logaddexp(0, outputs) - predictions.label[counted] * outputs
    loss = float(losses.mean())
    error = label_calibration(predictions).expected_error
  score = defined_mean(found.average_precision)
  return {
    "score": float("nan") if score is None else score,
    "map": score,
    "loss": loss,
    "f1_macro": defined_mean(found.f1),
    "per_class": _or_none(found.average_precision),
    "f1_per_class": _or_none(found.f1),
    "thresholds": found.best_threshold.tolist(),
    "calibration_error": error,
    "examples": int(counted.sum()),
    "not_finite": predictions.not_finite,
  }


def _column(
  predictions: LabelPredictions, label: int
) -> tuple[Bool[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
  """Whether each example that counts has the label, and its scores.

  The score is the probability, or -1, below all, if outputs are not finite.
  """
  counted = predictions.counted
  right = predictions.label[counted, label] > 0.5
  return right, np.nan_to_num(predictions.probability[counted, label], nan=-1)


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


def _or_none(values: Float64[np.ndarray, " c"]) -> list[float | None]:
  return [None if np.isnan(value) else value for value in values.tolist()]

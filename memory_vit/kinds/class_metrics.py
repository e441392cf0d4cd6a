"""Metrics of a classifier over a split, and of each of its classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.stats
import sklearn.metrics
from jaxtyping import Float64, Int64

from memory_vit.kinds.calibration import calibrate
from memory_vit.kinds.predictions import SplitPredictions

# Confidence level of the Wilson intervals.
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Proportion:
  """Share of examples, with its 95 % Wilson score interval."""

  share: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class SplitMetrics:
  """Metrics over the readable examples of a split.

  Attributes:
    skipped: the number of examples that could not be read.
    not_finite: the number of examples whose outputs are not finite. They count
      as mistakes; if there are any, the last three metrics are None.
    top1: share of the examples whose most probable class is right.
    top5: share of the examples whose class is among the five most probable;
      None for at most five classes.
    majority: share of the examples that are of the most frequent class.
    macro_f1: mean F1 over the classes that have examples or are predicted.
    balanced_accuracy: mean recall over the classes that have examples.
    loss: mean cross-entropy, in nats.
    brier: mean Brier score over all classes, from 0 to 2.
    calibration_error: expected calibration error, see `Calibration`.
  """

  examples: int
  skipped: int
  not_finite: int
  top1: Proportion
  top5: Proportion | None
  majority: float
  macro_f1: float
  balanced_accuracy: float
  loss: float | None
  brier: float | None
  calibration_error: float | None


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class ClassMetrics:
  """Metrics of each of c classes.

  Attributes:
    support: number of examples of each class.
    predicted: number of examples for which each class is predicted.
    precision: share of `predicted` that is right; NaN if `predicted` is 0.
    recall: share of `support` that is right; NaN if `support` is 0.
    f1: harmonic mean of both; NaN if `support` and `predicted` are 0.
  """

  support: Int64[np.ndarray, " c"]
  predicted: Int64[np.ndarray, " c"]
  precision: Float64[np.ndarray, " c"]
  recall: Float64[np.ndarray, " c"]
  f1: Float64[np.ndarray, " c"]


def class_metrics(predictions: SplitPredictions) -> ClassMetrics:
  """Compute precision, recall and F1 of each class with scikit-learn."""
  classes = predictions.num_classes
  # If the outputs of an example are not finite, its prediction is the number of
  # classes: no class has this index.
  best = np.where(predictions.finite, predictions.top_classes[:, 0], classes)
  label, best = (
    predictions.label[predictions.counted],
    best[predictions.counted],
  )
  precision, recall, f1, support = (
    sklearn.metrics.precision_recall_fscore_support(
      label, best, labels=np.arange(classes), zero_division=np.nan
    )
  )
  predicted = np.bincount(best, minlength=classes + 1)[:classes]
  return ClassMetrics(
    support.astype(np.int64), predicted.astype(np.int64), precision, recall, f1
  )


def split_metrics(
  predictions: SplitPredictions, classes: ClassMetrics
) -> SplitMetrics:
  """Compute metrics over a split with at least one readable example."""
  counted, predicted = predictions.counted, predictions.predicted
  examples = int(counted.sum())
  among = predictions.top_classes == predictions.label[:, None]
  finite = bool(predictions.finite[counted].all())
  error = calibrate(
    predictions.confidence[predicted], predictions.correct[predicted]
  )
  return SplitMetrics(
    examples=examples,
    skipped=int((~counted).sum()),
    not_finite=int((counted & ~predicted).sum()),
    top1=_proportion(int(predictions.correct.sum()), examples),
    top5=_proportion(int((predicted & among.any(axis=1)).sum()), examples)
    if predictions.num_classes > predictions.top_classes.shape[1]
    else None,
    majority=int(classes.support.max()) / examples,
    macro_f1=float(np.nanmean(classes.f1)),
    balanced_accuracy=float(np.nanmean(classes.recall)),
    loss=_mean(predictions.loss[counted]) if finite else None,
    brier=_mean(predictions.brier[counted]) if finite else None,
    calibration_error=error.expected_error if finite else None,
  )


def _proportion(right: int, examples: int) -> Proportion:
  test = scipy.stats.binomtest(right, examples)
  interval = test.proportion_ci(LEVEL, method="wilson")
  return Proportion(right / examples, float(interval.low), float(interval.high))


def _mean(values: np.ndarray) -> float:
  return float(values.astype(np.float64).mean())

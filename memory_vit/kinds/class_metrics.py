"""Metrics of a classifier, over a split and of each of its classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.stats
import sklearn.metrics
from jaxtyping import Float64, Int64

from memory_vit.kinds.calibration import calibrate
from memory_vit.kinds.predictions import SplitPredictions

# Confidence level of the intervals.
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Proportion:
  """A share of examples, with its Wilson score interval at 95 %."""

  share: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class SplitMetrics:
  """Metrics over the readable examples of a split.

  Attributes:
    skipped: the number of examples that could not be read.
    not_finite: examples whose outputs are not finite. They count as mistakes,
      and with any of them the last three metrics are None.
    top1: share of the examples whose best class is right.
    top5: share whose class is among the best five; None for at most five
      classes.
    majority: share of the largest class.
    macro_f1: mean F1 over the classes that have examples or are predicted.
    balanced_accuracy: mean recall over the classes that have examples.
    loss: mean cross-entropy, in nats.
    brier: mean Brier score over all classes, from 0 to 2.
    calibration_error: the expected one, see `Calibration`.
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


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class ClassMetrics:
  """Metrics of each of c classes.

  Attributes:
    support: its examples.
    predicted: examples for which it is predicted.
    precision: share of `predicted` that is right; NaN if there are none.
    recall: share of `support` that is right; NaN if there are none.
    f1: harmonic mean of both; NaN without `support` and `predicted`.
  """

  support: Int64[np.ndarray, " c"]
  predicted: Int64[np.ndarray, " c"]
  precision: Float64[np.ndarray, " c"]
  recall: Float64[np.ndarray, " c"]
  f1: Float64[np.ndarray, " c"]


def class_metrics(predictions: SplitPredictions) -> ClassMetrics:
  """Precision, recall and F1 of each class, by scikit-learn."""
  classes = predictions.num_classes
  # `classes` is no class: outputs that are not finite are always wrong.
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
  """Metrics over all examples; at least one of them counts."""
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

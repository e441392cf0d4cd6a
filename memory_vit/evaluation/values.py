"""Metrics of a task of values (regression): MAE, RMSE, R2 and Spearman."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy.stats
import sklearn.metrics
from jaxtyping import Float64

from memory_vit.evaluation.metrics import defined_mean
from memory_vit.evaluation.split_predictions import ValuePredictions


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class ValueMetrics:
  """Metrics of each of c values; all NaN if an output is not finite.

  Attributes:
    mae: mean absolute error, in units of the value.
    rmse: root of the mean squared error, in units of the value.
    r2: share of the variance that is explained, at most 1; NaN if the value is
      the same for all examples.
    spearman: rank correlation of predicted and true values; NaN if either is
      the same for all examples.
  """

  mae: Float64[np.ndarray, " c"]
  rmse: Float64[np.ndarray, " c"]
  r2: Float64[np.ndarray, " c"]
  spearman: Float64[np.ndarray, " c"]


def value_metrics(predictions: ValuePredictions) -> ValueMetrics:
  """Metrics of each value, by scikit-learn and SciPy."""
  counted = predictions.counted
  right = predictions.target[counted]
  found = predictions.predicted[counted]
  count = right.shape[1]
  if predictions.not_finite:
    return ValueMetrics(*np.full((4, count), np.nan))
  r2, spearman = np.full((2, count), np.nan)
  varies, moves = _varies(right), _varies(found)
  for i in np.flatnonzero(varies):
    r2[i] = sklearn.metrics.r2_score(right[:, i], found[:, i])
    if moves[i]:
      spearman[i] = scipy.stats.spearmanr(right[:, i], found[:, i]).statistic
  each = {"multioutput": "raw_values"}
  return ValueMetrics(
    mae=sklearn.metrics.mean_absolute_error(right, found, **each),
    rmse=sklearn.metrics.root_mean_squared_error(right, found, **each),
    r2=r2,
    spearman=spearman,
  )


def summarise(predictions: ValuePredictions) -> dict[str, Any]:
  """The entries of `evaluate` for a task of values.

  "score" is "r2", the mean over the values that vary; NaN if none varies. If an
  output is not finite, it is -inf, "loss" is NaN, and other metrics are None.
  "loss" is the mean squared error of standardized values.
  """
  counted, kind = predictions.counted, predictions.kind
  right = predictions.target[counted]
  each = dataclasses.asdict(value_metrics(predictions))
  means = {name: defined_mean(values) for name, values in each.items()}
  score, loss = means["r2"], float("nan")
  if predictions.not_finite:
    score = -np.inf
  else:
    standardized = (right - np.array(kind.mean)) / np.array(kind.std)
    loss = float(((predictions.outputs[counted] - standardized) ** 2).mean())
  return {
    "score": score if _varies(right).any() else float("nan"),
    "loss": loss,
    **means,
    "per_class": [
      {name: defined_mean(values[i : i + 1]) for name, values in each.items()}
      for i in range(right.shape[1])
    ],
    "examples": int(counted.sum()),
    "not_finite": predictions.not_finite,
  }


def _varies(values: np.ndarray) -> np.ndarray:
  return (values != values[:1]).any(axis=0)

"""Metrics of a task of values (regression): MAE, RMSE, R2 and Spearman."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.stats
import sklearn.metrics
from jaxtyping import Bool, Float, Float32, Float64

from memory_vit.kinds.predictions import ValuePredictions
from memory_vit.kinds.scores import Evaluation, Scores, defined_mean, finite
from memory_vit.kinds.task_kind import TaskKind


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class ValueMetrics:
  """Metrics of each of c values; all NaN if an output is not finite.

  Attributes:
    mae: mean absolute error, in units of the value.
    rmse: root of the mean squared error, in units of the value.
    r2: share of the variance that is explained, at most 1; NaN if the true
      value is the same for all examples.
    spearman: rank correlation of predicted and true values; NaN if all true
      values, or all predicted values, are the same.
  """

  mae: Float64[np.ndarray, " c"]
  rmse: Float64[np.ndarray, " c"]
  r2: Float64[np.ndarray, " c"]
  spearman: Float64[np.ndarray, " c"]


def value_metrics(predictions: ValuePredictions) -> ValueMetrics:
  """Compute metrics of each value with scikit-learn and SciPy."""
  counted = predictions.counted
  right = predictions.target[counted]
  guess = predictions.predicted[counted]
  count = right.shape[1]
  if predictions.not_finite:
    return ValueMetrics(*np.full((4, count), np.nan))
  r2, spearman = np.full((2, count), np.nan)
  varies, moves = _varies(right), _varies(guess)
  for i in np.flatnonzero(varies):
    r2[i] = sklearn.metrics.r2_score(right[:, i], guess[:, i])
    if moves[i]:
      spearman[i] = scipy.stats.spearmanr(right[:, i], guess[:, i]).statistic
  per_value = {"multioutput": "raw_values"}
  return ValueMetrics(
    mae=sklearn.metrics.mean_absolute_error(right, guess, **per_value),
    rmse=sklearn.metrics.root_mean_squared_error(right, guess, **per_value),
    r2=r2,
    spearman=spearman,
  )


def evaluation_of_rows(
  kind: TaskKind,
  outputs: Float32[np.ndarray, "n c"],
  values: Float[np.ndarray, "n c"],
  counted: Bool[np.ndarray, " n"],
) -> Evaluation:
  """Compute `evaluation_of` from arrays, and add the predictions to it."""
  examples = ValuePredictions(
    kind=kind,
    target=values.astype(np.float64),
    outputs=outputs,
    counted=counted,
  )
  return dataclasses.replace(evaluation_of(examples), predictions=examples)


def evaluation_of(predictions: ValuePredictions) -> Evaluation:
  """Compute scores of a task of values; all None if an output is not finite.

  Metrics are means over all values, or for "r2" and "spearman" over the values
  that vary between examples.
  """
  counted, kind = predictions.counted, predictions.kind
  right = predictions.target[counted]
  per_value = dataclasses.asdict(value_metrics(predictions))
  means = {name: defined_mean(values) for name, values in per_value.items()}
  loss = None
  if not predictions.not_finite:
    standardized = (right - np.array(kind.mean)) / np.array(kind.std)
    loss = float(((predictions.outputs[counted] - standardized) ** 2).mean())
  return Evaluation(
    scores=Scores(
      score=means["r2"],
      loss=finite(loss),
      metrics={name: means[name] for name in ("r2", "mae", "rmse", "spearman")},
      per_output={
        name: [defined_mean(values[i : i + 1]) for i in range(right.shape[1])]
        for name, values in per_value.items()
      },
      examples=len(right),
      not_finite=predictions.not_finite,
    ),
    undefined="" if _varies(right).any() else _why_undefined(len(right)),
  )


def _why_undefined(examples: int) -> str:
  if examples == 1:
    return "it has only one image, but R2 needs at least two"
  return "all examples have the same values, so R2 is undefined"


def _varies(values: np.ndarray) -> np.ndarray:
  return (values != values[:1]).any(axis=0)

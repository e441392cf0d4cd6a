"""Metrics of a task of labels: average precision, F1 and thresholds."""

from __future__ import annotations

import dataclasses

import numpy as np
import sklearn.metrics
from jaxtyping import Bool, Float, Float32, Float64, Int64

from memory_vit.kinds.calibration import Calibration, calibrate
from memory_vit.kinds.class_metrics import ClassMetrics
from memory_vit.kinds.labels import THRESHOLD, cut_offs
from memory_vit.kinds.predictions import LabelPredictions
from memory_vit.kinds.scores import Evaluation, Scores, defined_mean
from memory_vit.kinds.task_kind import TaskKind


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class LabelMetrics(ClassMetrics):
  """Metrics of each of c labels: `ClassMetrics`, ranking and thresholds.

  Attributes:
    average_precision: area under the precision-recall curve, as a step
      function; NaN if `support` is 0.
    threshold: probability from which the task predicts a label.
    best_threshold: threshold with the greatest F1 on these examples; 0.5 if
      `support` is 0.
  """

  average_precision: Float64[np.ndarray, " c"]
  threshold: Float64[np.ndarray, " c"]
  best_threshold: Float64[np.ndarray, " c"]


def label_metrics(predictions: LabelPredictions) -> LabelMetrics:
  """Compute metrics of each label, like scikit-learn but ten times as fast.

  No label is predicted for an example whose outputs are not finite.
  """
  right = predictions.label[predictions.counted] > 0.5
  is_predicted = predictions.predicted_labels[predictions.counted]
  support, predicted = right.sum(axis=0), is_predicted.sum(axis=0)
  hits = (right & is_predicted).sum(axis=0)
  average = np.full(predictions.num_classes, np.nan)
  best = np.full(predictions.num_classes, THRESHOLD)
  for i in np.flatnonzero(support).tolist():
    average[i], best[i] = _ranked(*_ranking(predictions, i))
  return LabelMetrics(
    support=support,
    predicted=predicted,
    precision=_ratio(hits, predicted),
    recall=_ratio(hits, support),
    f1=_ratio(2 * hits, support + predicted),
    average_precision=average,
    threshold=cut_offs(predictions.kind, predictions.num_classes),
    best_threshold=best,
  )


def label_calibration(predictions: LabelPredictions) -> Calibration:
  """Compute calibration over all pairs of an example and a label.

  The confidence is the probability of the label, and the accuracy is the share
  of pairs in which the example has the label. Only finite examples count.
  """
  rows = predictions.has_prediction
  return calibrate(
    predictions.probability[rows].ravel(), predictions.label[rows].ravel() > 0.5
  )


def curve(
  predictions: LabelPredictions, label: int
) -> tuple[Float64[np.ndarray, " k"], Float64[np.ndarray, " k"]]:
  """Return precision and recall of a label for thresholds in rising order."""
  precision, recall, _ = sklearn.metrics.precision_recall_curve(
    *_column(predictions, label)
  )
  return precision, recall


def evaluation_of_rows(
  kind: TaskKind,
  outputs: Float32[np.ndarray, "n c"],
  labels: Float[np.ndarray, "n c"],
  counted: Bool[np.ndarray, " n"],
) -> Evaluation:
  """Compute `evaluation_of` from arrays, and add the predictions to it."""
  examples = LabelPredictions(
    kind=kind, label=labels.astype(np.float32), outputs=outputs, counted=counted
  )
  return dataclasses.replace(evaluation_of(examples), predictions=examples)


def evaluation_of(
  predictions: LabelPredictions, found: LabelMetrics | None = None
) -> Evaluation:
  """Compute scores of labels; `found` may be known `label_metrics`.

  "map" is the mean over the labels that at least one example has. The loss and
  "calibration_error" are None if an output is not finite.
  """
  found = found or label_metrics(predictions)
  counted = predictions.counted
  loss = error = None
  if not predictions.not_finite:
    outputs = predictions.outputs[counted].astype(np.float64)
    outputs /= predictions.kind.temperature
    # Binary cross-entropy, computed from logits.
    losses = np.logaddexp(0, outputs) - predictions.label[counted] * outputs
    loss = float(losses.mean())
    error = label_calibration(predictions).expected_error
  score = defined_mean(found.average_precision)
  problem = "no example has any label, so average precision is undefined"
  return Evaluation(
    scores=Scores(
      score=score,
      loss=loss,
      metrics={
        "map": score,
        "f1_macro": defined_mean(found.f1),
        "calibration_error": error,
      },
      per_output={
        "average_precision": _or_none(found.average_precision),
        "f1": _or_none(found.f1),
      },
      examples=int(counted.sum()),
      not_finite=predictions.not_finite,
    ),
    undefined=problem if score is None else "",
    thresholds=tuple(found.best_threshold.tolist()),
  )


def _column(
  predictions: LabelPredictions, label: int
) -> tuple[Bool[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
  """Return, for each counted example, whether it has the label, and a score.

  A score is the probability of the label, or -1 if an output is not finite.
  """
  counted = predictions.counted
  right = predictions.label[counted, label] > 0.5
  return right, np.nan_to_num(predictions.probability[counted, label], nan=-1)


def _ranking(
  predictions: LabelPredictions, label: int
) -> tuple[Bool[np.ndarray, " n"], np.ndarray, Float64[np.ndarray, " n"]]:
  """Return arrays over the counted examples: (has the label, output, score).

  `_ranked` ranks the examples by output, and not by score, because examples
  with different outputs may have equal scores.
  """
  outputs = predictions.outputs[predictions.counted, label]
  known = predictions.finite[predictions.counted]
  right, scores = _column(predictions, label)
  return right, np.where(known, outputs, -np.inf), scores


def _ranked(
  right: Bool[np.ndarray, " n"],
  outputs: Float[np.ndarray, " n"],
  scores: Float64[np.ndarray, " n"],
) -> tuple[float, float]:
  """Return average precision and best threshold; `right` must have a True."""
  order = np.argsort(-outputs)
  hits = right[order].cumsum()
  last = _last_of_equal(outputs[order])
  hits_at_last = hits[last]
  steps = np.diff(hits_at_last, prepend=0) * (hits_at_last / (last + 1))
  return steps.sum() / hits[-1], _best_threshold(hits, scores[order])


def _best_threshold(
  hits: Int64[np.ndarray, " n"], scores: Float64[np.ndarray, " n"]
) -> float:
  """Return the lowest of the thresholds with the greatest F1.

  Scores are rounded to float32, because exports return float32.

  Args:
    hits: for each example, how many examples up to this one have the label.
    scores: scores of the examples, in decreasing order.
  """
  rounded = scores.astype(np.float32)
  last = _last_of_equal(rounded)[::-1]
  last = last[rounded[last] >= 0]  # -1 marks non-finite outputs
  if not last.size:
    return THRESHOLD
  best = int((2 * hits[last] / (last + 1 + hits[-1])).argmax())
  below = rounded[last[best - 1]] if best else np.float32(0)
  return _between(below, rounded[last[best]])


def _between(below: np.float32, lowest: np.float32) -> float:
  """Return a threshold about halfway between two scores.

  Probabilities must not cross the threshold when they are rounded to float32.
  So choose two adjacent float32 numbers near the middle of the scores, and
  return a number just above the midpoint of these two numbers: rounding moves
  probabilities below the midpoint down, and probabilities above it up.
  """
  middle = np.float32((float(below) + float(lowest)) / 2)
  cut = max(middle, np.nextafter(below, lowest))
  if not cut:
    return 0.0
  edge = (float(np.nextafter(cut, np.float32(0))) + float(cut)) / 2
  return float(np.nextafter(edge, 1))


def _last_of_equal(
  scores: Float[np.ndarray, " n"],
) -> Int64[np.ndarray, " k"]:
  """Return the index of the last score in each sequence of equal scores."""
  return np.flatnonzero(np.append(scores[1:] != scores[:-1], True))


def _ratio(
  part: Int64[np.ndarray, " c"], whole: Int64[np.ndarray, " c"]
) -> Float64[np.ndarray, " c"]:
  """Return `part` / `whole` for each label; NaN if `whole` is 0."""
  return part / np.where(whole > 0, whole, np.nan)


def _or_none(values: Float64[np.ndarray, " c"]) -> list[float | None]:
  return [None if np.isnan(value) else value for value in values.tolist()]

"""Predictions for every example of a split.

For tasks of classes, an example takes 54 bytes for any number of classes (3 MB
for 50,000 examples): the five best classes and data for calibration, but no
logits. For labels and values, all outputs are stored, because their metrics
need all examples at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from memory_vit.kinds.labels import chosen
from memory_vit.kinds.task_kind import TaskKind, answer_line, answer_rows

# Number of best classes that are stored for each example.
TOP = 5


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class SplitPredictions:
  """Predictions of a task for the n examples of a split, in their order.

  Attributes:
    num_classes: c, the number of classes of the task.
    label: class of each example; meaningless if the example does not count.
    counted: whether an example was readable; if not, other fields mean nothing.
    finite: whether all logits of an example are finite; if not, it has no
      prediction, its probabilities are NaN, and it counts as a mistake.
    top_classes: the k best classes, best first, ties by class index; k is 5, or
      c if that is less.
    top_probabilities: probabilities of `top_classes`.
    loss: cross-entropy, in nats, of the calibrated probabilities.
    brier: squared differences between probabilities and the one-hot class,
      summed over all classes; from 0 to 2.
    known_score: the largest logit.
    unknown_below: threshold of the task: an example with a lower `known_score`
      is rejected as unknown; None if the task rejects no images.
  """

  num_classes: int
  label: Int32[np.ndarray, " n"]
  counted: Bool[np.ndarray, " n"]
  finite: Bool[np.ndarray, " n"]
  top_classes: Int32[np.ndarray, "n k"]
  top_probabilities: Float32[np.ndarray, "n k"]
  loss: Float32[np.ndarray, " n"]
  brier: Float32[np.ndarray, " n"]
  known_score: Float32[np.ndarray, " n"]
  unknown_below: float | None = None

  def first(self, size: int) -> Self:
    """Return the first `size` examples, without padding of the last batch."""
    return _first(self, size)

  @property
  def unknown(self) -> Bool[np.ndarray, " n"]:
    """Mask of rejected examples; a threshold also rejects non-finite logits."""
    if self.unknown_below is None:
      return np.zeros(len(self.label), bool)
    accepted = self.known_score >= np.float32(self.unknown_below)
    return ~(self.finite & accepted)

  @property
  def predicted(self) -> Bool[np.ndarray, " n"]:
    """Mask of the examples that count and have a prediction."""
    return self.counted & self.finite

  def texts(
    self, names: Sequence[str], number: int
  ) -> tuple[str, float | None, str]:
    """Return the predicted class, its probability, and the right class."""
    best = names[self.top_classes[number, 0]]
    return (
      f"unknown ({best})" if self.unknown[number] else best,
      float(self.confidence[number]),
      names[self.label[number]],
    )

  @property
  def correct(self) -> Bool[np.ndarray, " n"]:
    """Mask of the examples whose best class is the right one."""
    return self.predicted & (self.top_classes[:, 0] == self.label)

  @property
  def confidence(self) -> Float32[np.ndarray, " n"]:
    """Probability of the best class of each example."""
    return self.top_probabilities[:, 0]

  @property
  def mistakes(self) -> Int64[np.ndarray, " w"]:
    """Indices of examples with a wrong prediction, most confident first."""
    wrong = np.flatnonzero(self.predicted & ~self.correct)
    return wrong[np.argsort(-self.confidence[wrong], kind="stable")]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OutputPredictions:
  """All outputs of a task for the n examples of a split."""

  kind: TaskKind
  outputs: Float32[np.ndarray, "n c"]
  counted: Bool[np.ndarray, " n"]

  @property
  def num_classes(self) -> int:
    """Number of labels or values, c."""
    return self.outputs.shape[1]

  @functools.cached_property
  def finite(self) -> Bool[np.ndarray, " n"]:
    """Mask of the examples whose outputs are all finite."""
    return np.isfinite(self.outputs).all(axis=1)

  @property
  def has_prediction(self) -> Bool[np.ndarray, " n"]:
    """Mask of the examples that count and whose outputs are finite."""
    return self.counted & self.finite

  @property
  def not_finite(self) -> int:
    """Number of examples that count but have outputs that are not finite."""
    return int((self.counted & ~self.finite).sum())

  def first(self, size: int) -> Self:
    """Return the first `size` examples, without padding of the last batch."""
    return _first(self, size)

  @functools.cached_property
  def _activated(self) -> Float64[np.ndarray, "n c"]:
    finite = self.finite[:, None]
    # Use float64: in float32, values with a huge mean or `std` overflow.
    outputs = np.where(finite, self.outputs, 0).astype(np.float64)
    return np.where(finite, self.kind.activate(outputs), np.nan)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LabelPredictions(OutputPredictions):
  """Predictions of c labels for the n examples of a split, in their order.

  Attributes:
    kind: description of the task, with its thresholds.
    label: 1 for the labels of an example, 0 for others; meaningless if the
      example does not count.
    outputs: logits of the head.
    counted: whether an example could be read; if not, its outputs are
      meaningless.
  """

  label: Float32[np.ndarray, "n c"]

  @property
  def probability(self) -> Float64[np.ndarray, "n c"]:
    """Probability of each label; NaN if an output is not finite."""
    return self._activated

  def texts(
    self, names: Sequence[str], number: int
  ) -> tuple[str, float | None, str]:
    """Return (predicted labels with probabilities, None, right labels)."""
    [answer] = self.kind.answers(names, self.probability[number][None])
    true = np.flatnonzero(self.label[number]).tolist()
    right = ", ".join(names[k] for k in true) or "no label"
    return answer_line(answer), None, right

  @property
  def predicted_labels(self) -> Bool[np.ndarray, "n c"]:
    """Mask of labels at or above their thresholds; False if not finite."""
    return chosen(self.kind, self.probability)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ValuePredictions(OutputPredictions):
  """Predictions of c values for the n examples of a split, in their order.

  Attributes:
    kind: description of the task, with its mean, std and units.
    target: the true values, in the units of the task; meaningless if the
      example does not count.
    outputs: standardized outputs of the head.
    counted: whether an example could be read; if not, its outputs are
      meaningless.
  """

  target: Float64[np.ndarray, "n c"]

  @property
  def predicted(self) -> Float64[np.ndarray, "n c"]:
    """Predictions in the units of the task; NaN if outputs are not finite."""
    return self._activated

  def texts(
    self, names: Sequence[str], number: int
  ) -> tuple[str, float | None, str]:
    """Return (predicted values with units, None, true values with units)."""
    rows = np.stack([self.target[number], self.predicted[number]])
    right, predicted = (
      ", ".join(text for _, text in answer_rows(answer))
      for answer in self.kind.answers(names, rows)
    )
    return predicted, None, right

  @property
  def rounded(self) -> Float64[np.ndarray, "n c"]:
    """`predicted`, without digits beyond the precision of float32 outputs."""
    places = 6 - np.floor(np.log10(self.kind.std)).astype(int)
    columns = zip(self.predicted.T, places.tolist(), strict=True)
    return np.stack([np.round(column, n) for column, n in columns], axis=1)


def _first(predictions: Any, size: int) -> Any:
  """Return `predictions` with only the first `size` rows of each array."""
  values = {
    field.name: getattr(predictions, field.name)
    for field in dataclasses.fields(predictions)
  }
  arrays = {k: v for k, v in values.items() if isinstance(v, np.ndarray)}
  return dataclasses.replace(
    predictions, **{key: array[:size] for key, array in arrays.items()}
  )

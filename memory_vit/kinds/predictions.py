"""Predictions for every example of a split.

Of classes without logits, the five best of each example, and what calibration
needs: 54 bytes for any number of classes, 3 MB for 50,000 examples. Of labels
and values all outputs, as their metrics need all examples at once.
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

# The number of best classes of an example.
TOP = 5


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class SplitPredictions:
  """Predictions of a task for the n examples of a split, in their order.

  Attributes:
    num_classes: c, of the task.
    label: the class of an example; meaningless if it does not count.
    counted: whether it could be read; if not, its other fields are meaningless.
    finite: whether all its logits are finite; if not, it has no prediction, its
      probabilities are NaN, and it counts as a mistake.
    top_classes: the k best classes, the best first; k is 5, or c if that is
      less. Of equal ones the first.
    top_probabilities: of these classes.
    loss: cross-entropy, in nats, of the calibrated probabilities.
    brier: the sum over the classes of the squared difference between the
      probability and 1 for the right class, 0 for the others; from 0 to 2.
    known_score: the largest logit.
    unknown_below: the `known_score` below which an example is taken for one of
      no class; None if the task takes all for known.
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
    """Without the rows beyond, which pad the last batch."""
    return _first(self, size)

  @property
  def unknown(self) -> Bool[np.ndarray, " n"]:
    """Whether an example is taken for one of no class; if not finite, it is."""
    if self.unknown_below is None:
      return np.zeros(len(self.label), bool)
    accepted = self.known_score >= np.float32(self.unknown_below)
    return ~(self.finite & accepted)

  @property
  def predicted(self) -> Bool[np.ndarray, " n"]:
    """Whether an example counts and has a prediction."""
    return self.counted & self.finite

  def texts(
    self, names: Sequence[str], number: int
  ) -> tuple[str, float | None, str]:
    """Describe an example: what is predicted, how surely, and what is right."""
    best = names[self.top_classes[number, 0]]
    return (
      f"unknown ({best})" if self.unknown[number] else best,
      float(self.confidence[number]),
      names[self.label[number]],
    )

  @property
  def correct(self) -> Bool[np.ndarray, " n"]:
    """Whether the best class is the right one."""
    return self.predicted & (self.top_classes[:, 0] == self.label)

  @property
  def confidence(self) -> Float32[np.ndarray, " n"]:
    """The probability of the best class."""
    return self.top_probabilities[:, 0]

  @property
  def mistakes(self) -> Int64[np.ndarray, " w"]:
    """Numbers of the examples with a wrong prediction, most confident first."""
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
    """The number of labels or values, c."""
    return self.outputs.shape[1]

  @functools.cached_property
  def finite(self) -> Bool[np.ndarray, " n"]:
    """Whether all outputs for an example are finite."""
    return np.isfinite(self.outputs).all(axis=1)

  @property
  def has_prediction(self) -> Bool[np.ndarray, " n"]:
    """Whether an example counts and its outputs are finite."""
    return self.counted & self.finite

  @property
  def not_finite(self) -> int:
    """The number of examples that count whose outputs are not finite."""
    return int((self.counted & ~self.finite).sum())

  def first(self, size: int) -> Self:
    """Without the rows beyond, which pad the last batch."""
    return _first(self, size)

  @functools.cached_property
  def _activated(self) -> Float64[np.ndarray, "n c"]:
    finite = self.finite[:, None]
    # In float32 a value of a great mean or deviation would overflow.
    outputs = np.where(finite, self.outputs, 0).astype(np.float64)
    return np.where(finite, self.kind.activate(outputs), np.nan)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LabelPredictions(OutputPredictions):
  """Predictions of c labels for the n examples of a split, in their order.

  Attributes:
    kind: of the task, with its thresholds.
    label: 1 for the labels of an example, 0 for others; meaningless if the
      example does not count.
    outputs: of the head; the sigmoid makes probabilities.
    counted: whether an example could be read; if not, its outputs are
      meaningless.
  """

  label: Float32[np.ndarray, "n c"]

  @property
  def probability(self) -> Float64[np.ndarray, "n c"]:
    """The probability of each label; NaN if an output is not finite."""
    return self._activated

  def texts(
    self, names: Sequence[str], number: int
  ) -> tuple[str, float | None, str]:
    """Predicted labels with their probabilities, None, and the right ones."""
    [found] = self.kind.answers(names, self.probability[number][None])
    true = np.flatnonzero(self.label[number]).tolist()
    right = ", ".join(names[k] for k in true) or "no label"
    return answer_line(found), None, right

  @property
  def predicted_labels(self) -> Bool[np.ndarray, "n c"]:
    """Whether a label is at or above its threshold; none if not finite."""
    return chosen(self.kind, self.probability)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ValuePredictions(OutputPredictions):
  """Predictions of c values for the n examples of a split, in their order.

  Attributes:
    kind: of the task, with its mean, std and units.
    target: the true values, in the units of the task; meaningless if the
      example does not count.
    outputs: of the head, standardized.
    counted: whether an example could be read; if not, its outputs are
      meaningless.
  """

  target: Float64[np.ndarray, "n c"]

  @property
  def predicted(self) -> Float64[np.ndarray, "n c"]:
    """In the units of the task; NaN if outputs are not finite."""
    return self._activated

  def texts(
    self, names: Sequence[str], number: int
  ) -> tuple[str, float | None, str]:
    """Predicted values with their units, None, and the true ones."""
    rows = np.stack([self.target[number], self.predicted[number]])
    right, said = (
      ", ".join(text for _, text in answer_rows(answer))
      for answer in self.kind.answers(names, rows)
    )
    return said, None, right

  @property
  def rounded(self) -> Float64[np.ndarray, "n c"]:
    """`predicted`, without digits that float32 outputs do not determine."""
    places = 6 - np.floor(np.log10(self.kind.std)).astype(int)
    columns = zip(self.predicted.T, places.tolist(), strict=True)
    return np.stack([np.round(column, n) for column, n in columns], axis=1)


def _first(predictions: Any, size: int) -> Any:
  """The first rows of all arrays."""
  values = {
    field.name: getattr(predictions, field.name)
    for field in dataclasses.fields(predictions)
  }
  arrays = {k: v for k, v in values.items() if isinstance(v, np.ndarray)}
  return dataclasses.replace(
    predictions, **{key: array[:size] for key, array in arrays.items()}
  )

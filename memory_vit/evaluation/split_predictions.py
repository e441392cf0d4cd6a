"""Predictions for every example of a split.

Of classes without logits, the five best of each example, and what calibration
needs: 54 bytes for any number of classes, 3 MB for 50,000 examples. Of labels
and values all outputs, as their metrics need all examples at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int, Int32, Int64

from memory_vit.evaluation import metrics
from memory_vit.model.kinds import TaskKind

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
    loss: cross-entropy, in nats.
    brier: the sum over the classes of the squared difference between the
      probability and 1 for the right class, 0 for the others; from 0 to 2.
  """

  num_classes: int
  label: Int32[np.ndarray, " n"]
  counted: Bool[np.ndarray, " n"]
  finite: Bool[np.ndarray, " n"]
  top_classes: Int32[np.ndarray, "n k"]
  top_probabilities: Float32[np.ndarray, "n k"]
  loss: Float32[np.ndarray, " n"]
  brier: Float32[np.ndarray, " n"]

  @property
  def predicted(self) -> Bool[np.ndarray, " n"]:
    """Whether an example counts and has a prediction."""
    return self.counted & self.finite

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


def predict_examples(
  logits: Float[Array, "b c"],
  labels: Int[Array, " b"],
  mask: Float32[Array, " b"],
) -> dict[str, Array]:
  """The fields of `SplitPredictions` for a batch.

  The best classes are those that "top1" and "top5" of `batch_sums` count.
  """
  logits = logits.astype(jnp.float32)
  best, classes = metrics.top_classes(logits, TOP)
  total = jax.nn.logsumexp(logits, axis=-1)
  of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
  shares = jnp.exp(logits - total[:, None])
  return {
    "label": labels.astype(jnp.int32),
    "counted": mask > 0,
    "finite": jnp.isfinite(logits).all(axis=-1),
    "top_classes": classes.astype(jnp.int32),
    "top_probabilities": jnp.exp(best - total[:, None]),
    "loss": total - of_label,
    "brier": (shares**2).sum(axis=-1) - 2 * jnp.exp(of_label - total) + 1,
  }


def of_examples(
  arrays: Mapping[str, np.ndarray], num_classes: int, size: int
) -> SplitPredictions:
  """Join the rows of all batches; those beyond `size` pad the last batch."""
  rows = {name: values[:size] for name, values in arrays.items()}
  return SplitPredictions(num_classes=num_classes, **rows)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Outputs:
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
    names = {field.name for field in dataclasses.fields(self)} - {"kind"}
    rows = {name: getattr(self, name)[:size] for name in names}
    return dataclasses.replace(self, **rows)

  @functools.cached_property
  def _activated(self) -> Float64[np.ndarray, "n c"]:
    finite = self.finite[:, None]
    # In float32 a value of a great mean or deviation would overflow.
    outputs = np.where(finite, self.outputs, 0).astype(np.float64)
    return np.where(finite, self.kind.activate(outputs), np.nan)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LabelPredictions(_Outputs):
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

  @property
  def predicted_labels(self) -> Bool[np.ndarray, "n c"]:
    """Whether a label is at or above its threshold; none if not finite."""
    return self.kind.chosen(self.probability)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ValuePredictions(_Outputs):
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

  @property
  def rounded(self) -> Float64[np.ndarray, "n c"]:
    """`predicted`, without digits that float32 outputs do not determine."""
    places = 6 - np.floor(np.log10(self.kind.std)).astype(int)
    columns = zip(self.predicted.T, places.tolist(), strict=True)
    return np.stack([np.round(column, n) for column, n in columns], axis=1)


def of_outputs(
  kind: TaskKind,
  outputs: Float[np.ndarray, "n c"],
  labels: Float[np.ndarray, "n c"],
  mask: Float32[np.ndarray, " n"],
) -> LabelPredictions | ValuePredictions:
  """Join the rows of all batches; `mask` is 1 for examples that count."""
  outputs, counted = outputs.astype(np.float32), mask > 0
  if kind.is_labels:
    label = labels.astype(np.float32)
    return LabelPredictions(
      kind=kind, label=label, outputs=outputs, counted=counted
    )
  target = labels.astype(np.float64)
  return ValuePredictions(
    kind=kind, target=target, outputs=outputs, counted=counted
  )

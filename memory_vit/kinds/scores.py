"""Scores of a task on a split: the same fields for every kind of task."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from memory_vit.errors import TaskError

# Fields of an `Evaluation` that are computed only on request.
Also = Literal["digest", "hits", "predictions", "held_out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """Metrics of a task on a split; a number is None if it is undefined.

  Without a split, `examples` is 0, and no other number is defined.

  Attributes:
    score: the first of `metrics`, the higher the better: accuracy (classes),
      mean average precision (labels) or R2 (values).
    loss: mean cross-entropy (classes), mean binary cross-entropy (labels) or
      mean squared error in standard deviations (values). None if the outputs
      for an example are not finite.
    metrics: numbers over all examples. Classes: "top1" and "top5", in [0, 1];
      labels: "map", and "f1_macro" at the thresholds of the task; both:
      "calibration_error"; values: "r2", "mae" and "rmse" in the units of the
      values, and "spearman".
    per_output: metrics of each class ("accuracy"), label ("average_precision",
      "f1") or value (as in `metrics`).
    examples: number of images.
    skipped: number of images that could not be read and are not in `examples`.
    not_finite: number of images with an output that is not finite. They count
      as mistakes (classes) or as images without predicted labels (labels); for
      values, no metric is defined.
  """

  score: float | None = None
  loss: float | None = None
  metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
  per_output: Mapping[str, Sequence[float | None]] = dataclasses.field(
    default_factory=dict, repr=False
  )
  examples: int = 0
  skipped: int = 0
  not_finite: int = 0

  @property
  def accuracy(self) -> float | None:
    """Share of correctly classified images; `TaskError` unless classes."""
    return self._of_classes("accuracy", self.metrics, "top1")

  @property
  def top5(self) -> float | None:
    """Share of images whose class is among the five highest logits."""
    return self._of_classes("top-5 accuracy", self.metrics, "top5")

  @property
  def per_class(self) -> Sequence[float | None] | None:
    """Accuracy of each class; None for a class without images."""
    return self._of_classes("accuracy of classes", self.per_output, "accuracy")

  def _of_classes(self, noun: str, numbers: Mapping[str, Any], key: str) -> Any:
    if self.metrics and "top1" not in self.metrics:
      raise TaskError(
        f"there is no {noun} among these scores: read .score or .metrics "
        f"({', '.join(self.metrics)}), or .per_output."
      )
    return numbers.get(key)


@dataclasses.dataclass(frozen=True)
class Rejection:
  """Effect of `TaskKind.unknown`, a threshold, on images of known classes.

  Attributes:
    rejected: share of the examples that are rejected as unknown.
    accuracy: accuracy on the accepted examples; None if all are rejected.
  """

  rejected: float
  accuracy: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
  """Scores of a task on a split, and further results.

  Attributes:
    scores: scores over the examples that could be read.
    rejection: effect of rejecting images; None if the task rejects none.
    undefined: reason why the targets of the split make the score undefined, for
      example because all values are equal; "" if the targets do not.
    majority: share of the most frequent class (classes only).
    thresholds: thresholds with the greatest F1 on this split (labels only).
    digest: SHA-256 over the bytes of all outputs, if requested.
    hits: which examples are right (classes only), if requested.
    predictions: predictions for all examples, if requested.
    held_out: outputs and targets of all examples, if requested.
  """

  scores: Scores
  rejection: Rejection | None = None
  undefined: str = ""
  majority: float | None = None
  thresholds: tuple[float, ...] = ()
  digest: str | None = None
  hits: Any = None
  predictions: Any = None
  held_out: Any = None


def finite(number: float | None) -> float | None:
  """Return the number, or None for NaN and infinity, which JSON cannot hold."""
  return number if number is not None and math.isfinite(number) else None


def defined_mean(values: Any) -> float | None:
  """Return the mean of the values that are not NaN; None if there are none."""
  defined = values[values == values]
  return float(defined.mean()) if defined.size else None

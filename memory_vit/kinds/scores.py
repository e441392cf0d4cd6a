"""Scores of a task on a split: the same fields for every kind of task."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from memory_vit.errors import TaskError

# Fields of an `Evaluation` that must be asked for.
Also = Literal["digest", "hits", "predictions", "held_out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """Numbers of a task on a split; None where one is undefined.

  Without a split there are no examples, and no other numbers.

  Attributes:
    score: the first of `metrics`, the higher the better: accuracy of classes,
      mean average precision of labels, R2 of values.
    loss: mean cross-entropy, of labels binary; of values the mean squared error
      in standard deviations. None if the outputs for an example are not finite.
    metrics: numbers over all examples. Of classes "top1" and "top5", in [0, 1];
      of labels "map" and "f1_macro" at the thresholds of the task; of both
      "calibration_error"; of values "r2", "mae" and "rmse" in their units, and
      "spearman".
    per_output: numbers of each class ("accuracy"), label ("average_precision",
      "f1") or value (as `metrics`).
    examples: number of images.
    skipped: number of images that could not be read; `examples` leaves them
      out.
    not_finite: number of images with an output that is not finite. They count
      as mistakes, or as images without labels; of values, no metric is defined.
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
    """Share of images whose class is right; `TaskError` for other kinds."""
    return self._of_classes("accuracy", self.metrics, "top1")

  @property
  def top5(self) -> float | None:
    """Share of images whose class is among the five highest logits."""
    return self._of_classes("top-5 accuracy", self.metrics, "top5")

  @property
  def per_class(self) -> Sequence[float | None] | None:
    """Accuracy of each class; None for a class without images."""
    return self._of_classes("accuracy of classes", self.per_output, "accuracy")

  def _of_classes(self, what: str, numbers: Mapping[str, Any], key: str) -> Any:
    if self.metrics and "top1" not in self.metrics:
      raise TaskError(
        f"there is no {what} among these scores: read .score or .metrics "
        f"({', '.join(self.metrics)}), or .per_output."
      )
    return numbers.get(key)


@dataclasses.dataclass(frozen=True)
class Rejection:
  """Effect of the threshold of unknown images on images of known classes.

  Attributes:
    rejected: share of the examples that are taken for unknown.
    accuracy: of the others; None if all are rejected.
  """

  rejected: float
  accuracy: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # it holds arrays
class Evaluation:
  """Scores of a task on a split, and what is no score.

  Attributes:
    scores: of the examples that could be read.
    rejection: of a task that rejects images, what that does to them.
    undefined: why there is no score on such a split, for people; "" if there
      is, or if it is the outputs that are not finite.
    majority: of classes, the share of the largest class.
    thresholds: of labels, those with the greatest F1 on this split.
    digest: SHA-256 over the bytes of all outputs, if it was asked for.
    hits: of classes, which examples are right, if it was asked for.
    predictions: for all examples, if they were asked for.
    held_out: outputs and targets of all examples, if they were asked for.
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
  """JSON has no NaN and no infinity."""
  return number if number is not None and math.isfinite(number) else None


def defined_mean(values: Any) -> float | None:
  """Mean of the values that are not NaN; None if there are none."""
  defined = values[values == values]
  return float(defined.mean()) if defined.size else None

"""Loss of a head: the loss of its kind of task, with options of the run."""

import dataclasses
from typing import Any

import jax

from memory_vit.config import Config
from memory_vit.kinds import KINDS
from memory_vit.kinds.kind import HeadOutputs, Kind, LossOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLoss(LossOptions):
  """Kind of a task, and options of its loss."""

  kind: str = "classes"

  @classmethod
  def of(cls, config: Config) -> "HeadLoss":
    return cls(
      kind=config.task.kind,
      smoothing=config.optim.label_smoothing,
      weighted=config.optim.class_weights == "balanced",
      huber=config.task.loss == "huber",
    )

  @property
  def metric(self) -> str:
    """Name of the metric that is computed beside the loss."""
    return self._kind.trained_metric

  @property
  def _kind(self) -> Kind:
    return KINDS[self.kind]

  def of_batch(
    self, logits: jax.Array, labels: Any, outputs: HeadOutputs
  ) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss and mean `metric` of a batch, for outputs (b, c).

    Labels are as `Kind.standardized` returns them. Accuracy is the share of
    right predictions, for each image or each pair of image and label; "mae" is
    the mean absolute error in standard deviations.
    """
    loss, metric = self._kind.loss(logits, labels, self, outputs)
    return loss.mean(), metric.mean()

"""The loss of a head: that of its kind of task, with the options of a run."""

import dataclasses
from typing import Any

import jax

from memory_vit.config import Config
from memory_vit.kinds import KINDS
from memory_vit.kinds.kind import HeadOutputs, Kind, LossOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLoss(LossOptions):
  """The kind of a task, and the options of its loss."""

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
    """The name of the metric beside the loss."""
    return self._kind.trained_metric

  @property
  def _kind(self) -> Kind:
    return KINDS[self.kind]

  def of_batch(
    self, logits: jax.Array, labels: Any, outputs: HeadOutputs
  ) -> tuple[jax.Array, jax.Array]:
    """Mean loss and `metric` of a batch, for outputs (b, c).

    Values are standardized, see `Kind.standardized`. Accuracy is the share of
    images, or of pairs of image and label, that are right; "mae" is the mean
    absolute error in standard deviations.
    """
    loss, metric = self._kind.loss(logits, labels, self, outputs)
    return loss.mean(), metric.mean()

"""Predictions for every example of a split, without its logits.

The five best classes of each example, and what calibration needs: 54 bytes for
any number of classes, 3 MB for 50,000 examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Int64

from memory_vit.evaluation import metrics

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

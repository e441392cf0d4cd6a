"""Temperature: a fitted number that divides logits before they are activated.

Guo et al., "On Calibration of Modern Neural Networks" (2017). A temperature
changes how confident a task is, and never which class it predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy.optimize
from jaxtyping import Float32, Num

# Bounds of a fitted temperature. If all images are classified correctly, the
# log-loss has no minimum: a lower temperature always has a lower loss.
LEAST, GREATEST = 1e-3, 1e3
# Weight of the prior: `fit` adds `_PRIOR * log(t)**2` nats to the loss.
_PRIOR = 2.0


def fit(log_loss: Callable[[float], float], examples: int) -> float:
  """Return the temperature with the least log-loss, shrunk toward 1.

  It minimizes `examples * log_loss(t) + 2 * log(t)**2`, the log-loss with a
  normal prior of standard deviation 0.5 on log t. With few examples the result
  stays near 1, and with hundreds of examples the prior hardly matters.

  Args:
    log_loss: mean log-loss of the examples at a temperature, in nats.
    examples: number of examples.
  """
  minimum = scipy.optimize.minimize_scalar(
    lambda log_t: examples * log_loss(math.exp(log_t)) + _PRIOR * log_t**2,
    bounds=(math.log(LEAST), math.log(GREATEST)),
    method="bounded",
  )
  return math.exp(minimum.x)


def of_classes(
  logits: Float32[np.ndarray, "n c"], classes: Num[np.ndarray, " n"]
) -> float:
  """Fit the temperature of a task of classes."""
  # Use float64: float32 rounding errors in the loss mislead the minimizer.
  centered = logits.astype(np.float64)
  centered -= centered.max(axis=1, keepdims=True)
  right = np.take_along_axis(centered, classes[:, None], axis=1)[:, 0]

  def log_loss(t: float) -> float:
    sums = np.exp(centered / t).sum(axis=1)
    return float((np.log(sums) - right / t).mean())

  return fit(log_loss, len(classes))


def of_labels(
  logits: Float32[np.ndarray, "n c"], labels: Num[np.ndarray, "n c"]
) -> float:
  """Fit the temperature of a task of labels; an image counts as one example."""
  outputs = logits.astype(np.float64)

  def log_loss(t: float) -> float:
    return float((np.logaddexp(0, outputs / t) - labels * outputs / t).mean())

  return fit(log_loss, len(labels))

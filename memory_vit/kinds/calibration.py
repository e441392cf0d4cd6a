"""Calibration of a classifier: accuracy for a given confidence."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

# Number of bins, as in Guo et al., "On Calibration of Modern Neural Networks"
# (2017).
BINS = 15


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class Calibration:
  """Confidence and accuracy in k bins of equal width.

  Bin i holds the examples whose confidence, the probability of the best class,
  is above i / k and at most (i + 1) / k.

  Attributes:
    count: number of examples in each bin.
    confidence: mean confidence in each bin; NaN in an empty bin.
    accuracy: accuracy in each bin; NaN in an empty bin.
  """

  count: Int64[np.ndarray, " k"]
  confidence: Float64[np.ndarray, " k"]
  accuracy: Float64[np.ndarray, " k"]

  @property
  def edges(self) -> Float64[np.ndarray, " edges"]:
    """Edges of the bins, from 0 to 1."""
    return np.linspace(0, 1, len(self.count) + 1)

  @property
  def expected_error(self) -> float:
    """Expected calibration error (ECE); NaN without examples.

    The absolute difference between confidence and accuracy of each bin,
    averaged over the examples.
    """
    filled = self.count > 0
    if not filled.any():
      return float("nan")
    gaps = np.abs(self.confidence - self.accuracy)[filled]
    return float(np.average(gaps, weights=self.count[filled]))


def calibrate(
  confidence: Float[np.ndarray, " n"],
  correct: Bool[np.ndarray, " n"],
  bins: int = BINS,
) -> Calibration:
  """Bin examples by confidence; average confidence and accuracy per bin.

  Args:
    confidence: the probability of the best class of each example.
    correct: whether the best class of each example is right.
    bins: k, the number of bins.
  """
  inner = np.linspace(0, 1, bins + 1)[1:-1]
  place = np.digitize(confidence.astype(np.float64), inner, right=True)

  def total(weights: np.ndarray) -> np.ndarray:
    return np.bincount(place, weights.astype(np.float64), minlength=bins)

  count = np.bincount(place, minlength=bins).astype(np.int64)
  divisor = np.where(count > 0, count, np.nan)
  return Calibration(
    count, total(confidence) / divisor, total(correct) / divisor
  )

"""Confusion matrix of a classifier."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy.sparse

from memory_vit.kinds.predictions import SplitPredictions


@dataclasses.dataclass(frozen=True)
class Confusion:
  """Number of examples of class `label` predicted as class `predicted`."""

  label: int
  predicted: int
  examples: int


def confusion_matrix(predictions: SplitPredictions) -> Any:
  """Count examples by their class and by the predicted class, int64 (c, c).

  The matrix is sparse: for 20,000 classes, a dense matrix would take 3 GB.
  Examples without a prediction are left out.
  """
  predicted = predictions.predicted
  label, best = (
    predictions.label[predicted],
    predictions.top_classes[predicted, 0],
  )
  side = predictions.num_classes
  ones = np.ones(len(label), np.int64)
  # SciPy sums the entries at the same place (label, best): each sum is a count.
  return scipy.sparse.csr_array((ones, (label, best)), shape=(side, side))


def largest_confusions(matrix: Any, count: int) -> list[Confusion]:
  """Return at most `count` pairs of different classes with the most examples.

  Pairs with equally many examples are ordered by class index.
  """
  pairs = matrix.tocoo()
  label, predicted = pairs.coords
  wrong = np.flatnonzero((label != predicted) & (pairs.data > 0))
  label, predicted, examples = label[wrong], predicted[wrong], pairs.data[wrong]
  order = np.lexsort((predicted, label, -examples))[:count]
  return [
    Confusion(int(label[i]), int(predicted[i]), int(examples[i])) for i in order
  ]

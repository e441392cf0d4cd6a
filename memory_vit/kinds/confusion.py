"""Confusion matrix of a classifier."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy.sparse

from memory_vit.kinds.predictions import SplitPredictions


@dataclasses.dataclass(frozen=True)
class Confusion:
  """A number of examples of one class that another one is predicted for."""

  label: int
  predicted: int
  examples: int


def confusion_matrix(predictions: SplitPredictions) -> Any:
  """Count examples by their class and by the predicted class, int64 (c, c).

  Sparse: a dense one of 20,000 classes would take 3 GB. Examples without a
  prediction are left out.
  """
  predicted = predictions.predicted
  label, best = (
    predictions.label[predicted],
    predictions.top_classes[predicted, 0],
  )
  side = predictions.num_classes
  ones = np.ones(len(label), np.int64)
  # scipy adds up repeated positions.
  return scipy.sparse.csr_array((ones, (label, best)), shape=(side, side))


def largest_confusions(matrix: Any, count: int) -> list[Confusion]:
  """The pairs of different classes with the most examples, at most `count`.

  Of equal ones the first classes come first.
  """
  found = matrix.tocoo()
  label, predicted = found.coords
  wrong = np.flatnonzero((label != predicted) & (found.data > 0))
  label, predicted, examples = label[wrong], predicted[wrong], found.data[wrong]
  order = np.lexsort((predicted, label, -examples))[:count]
  return [
    Confusion(int(label[i]), int(predicted[i]), int(examples[i])) for i in order
  ]

"""Confusions: which classes are taken for which, counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy.sparse

from memory_vit.evaluation.split_predictions import SplitPredictions


@dataclasses.dataclass(frozen=True)
class Confusion:
  """So many examples of one class that are taken for another one."""

  label: int
  predicted: int
  examples: int


def confusion_matrix(predictions: SplitPredictions) -> Any:
  """Count examples by their class and by the class that is predicted.

  Examples without a prediction are left out.

  Returns:
    int64 (c, c), a sparse array of scipy: of 20,000 classes a dense one would
    take 3 GB.
  """
  predicted = predictions.predicted
  label, best = (
    predictions.label[predicted],
    predictions.top_classes[predicted, 0],
  )
  side = predictions.num_classes
  ones = np.ones(len(label), np.int64)
  # Repeated places are added up.
  return scipy.sparse.csr_array((ones, (label, best)), shape=(side, side))


def largest_confusions(matrix: Any, count: int) -> list[Confusion]:
  """The pairs of different classes with the most examples.

  Args:
    matrix: as `confusion_matrix` returns it.
    count: of pairs, at most; those with the most examples come first, and of
      equal ones those of the first classes.
  """
  found = matrix.tocoo()
  label, predicted = found.coords
  wrong = np.flatnonzero((label != predicted) & (found.data > 0))
  label, predicted, examples = label[wrong], predicted[wrong], found.data[wrong]
  order = np.lexsort((predicted, label, -examples))[:count]
  return [
    Confusion(int(label[i]), int(predicted[i]), int(examples[i])) for i in order
  ]

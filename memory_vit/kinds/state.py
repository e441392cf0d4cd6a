"""States of metrics: made of a batch, merged with others, and then computed."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from memory_vit.kinds.kind import HeldOut
from memory_vit.kinds.scores import Evaluation

# Values of float64 travel through devices, which would round them, as these.
BITS = np.dtype(np.uint32)


class State(abc.ABC):
  """What is known of some examples of a split."""

  @abc.abstractmethod
  def merge(self, other: Self) -> Self:
    """Add later examples; the state that is returned takes over both."""

  @abc.abstractmethod
  def compute(self) -> Evaluation:
    """Metrics of all examples; its rows are those of all batches."""


class OutputState(State):
  """All outputs, for metrics that need those of all examples at once."""

  def __init__(
    self,
    evaluation_of: Callable[[np.ndarray, np.ndarray, np.ndarray], Evaluation],
    rows: tuple[Any, ...],
  ) -> None:
    """Keep the rows of a batch.

    Args:
      evaluation_of: outputs float32 (n, c), targets (n, c) and which count,
        bool (n,) -> the evaluation, with predictions.
      rows: outputs, targets and mask, on the host.
    """
    self._evaluation_of, self._batches = evaluation_of, [rows]

  def merge(self, other: Self) -> Self:
    self._batches += other._batches
    return self

  def compute(self) -> Evaluation:
    columns = zip(*self._batches, strict=True)
    outputs, targets, mask = map(np.concatenate, columns)
    if targets.dtype == BITS:
      targets = targets.view(np.float64)
    outputs, counted = outputs.astype(np.float32), mask > 0
    found = self._evaluation_of(outputs, targets, counted)
    known = counted & np.isfinite(outputs).all(axis=1)
    held_out = HeldOut(outputs[known], targets[known])
    return dataclasses.replace(found, held_out=held_out)

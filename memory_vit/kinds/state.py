"""Metric states: created for a batch, merged over batches, then computed."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from memory_vit.kinds.kind import HeldOut
from memory_vit.kinds.scores import Evaluation

# Devices would round float64 targets, so the bits of the targets are passed in
# this dtype.
BITS = np.dtype(np.uint32)


class State(abc.ABC):
  """Metric state: sums or rows of some examples of a split."""

  @abc.abstractmethod
  def merge(self, other: Self) -> Self:
    """Append the examples of `other`; only the returned state remains valid."""

  @abc.abstractmethod
  def compute(self) -> Evaluation:
    """Compute metrics over all merged examples, with results per example."""


class OutputState(State):
  """State with all outputs, for metrics that need all examples at once."""

  def __init__(
    self,
    evaluation_of: Callable[[np.ndarray, np.ndarray, np.ndarray], Evaluation],
    rows: tuple[Any, ...],
  ) -> None:
    """Store the rows of a batch.

    Args:
      evaluation_of: function of outputs float32 (n, c), targets (n, c) and a
        mask bool (n,) that returns an `Evaluation` with predictions.
      rows: outputs, targets and mask of the batch, on the host.
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
    evaluation = self._evaluation_of(outputs, targets, counted)
    known = counted & np.isfinite(outputs).all(axis=1)
    held_out = HeldOut(outputs[known], targets[known])
    return dataclasses.replace(evaluation, held_out=held_out)

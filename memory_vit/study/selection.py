"""What the runs of a study measured, and what is best on validation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """One task that was learned.

  Attributes:
    run: name of the run that learned it.
    regime: as in `runs.Run`; so are data and seed.
    data: see there.
    seed: see there.
    reads: whether it attends to another task.
    learning_rate: its own.
    cells: its own, 0 in a regime without memory.
    validation: accuracy; None where it diverged.
    test: accuracy; None where it diverged, or was not tested.
    parameters: that were trained, its head among them.
    task: directory to which it was exported.
    examples: on which it was tested; None as `test`.
  """

  run: str
  regime: str
  data: str
  seed: int
  reads: bool
  learning_rate: float
  cells: int
  validation: float | None = None
  test: float | None = None
  parameters: int | None = None
  task: str | None = None
  examples: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A learning rate that was chosen on validation, with its test accuracies.

  Attributes:
    learning_rate: with the best validation accuracy of what it is chosen by; of
      equals the lowest.
    validation: mean of the accuracies that it was chosen by.
    tests: accuracy of every seed that did not diverge.
    diverged: seeds that did.
    parameters: that were trained.
  """

  learning_rate: float
  validation: float
  tests: tuple[float, ...]
  diverged: int
  parameters: int

  @property
  def test(self) -> float:
    """Mean over seeds."""
    return float(np.mean(self.tests))

  @property
  def spread(self) -> float | None:
    """Greatest less least test accuracy; of one seed there is none."""
    return max(self.tests) - min(self.tests) if len(self.tests) > 1 else None


def select(points: Sequence[Point], **values: Any) -> list[Point]:
  """The points with these values; those that read others only where asked."""
  values = {"reads": False, **values}
  return [
    point
    for point in points
    if all(getattr(point, key) == value for key, value in values.items())
  ]


def choose(points: Sequence[Point], seed: int | None = None) -> Choice | None:
  """Chooses a learning rate on validation.

  Args:
    points: of one regime, with one number of cells, on one data set; all have
      been tested.
    seed: whose validation alone counts; by default the mean over seeds does.

  Returns:
    The choice, with the test accuracies of all seeds. A rate at which a seed
    diverged whose validation counts is not chosen; None where all are such.
  """
  choices = []
  for rate in sorted({point.learning_rate for point in points}):
    seeds = [point for point in points if point.learning_rate == rate]
    counting = [p for p in seeds if seed is None or p.seed == seed]
    if any(point.validation is None for point in counting):
      continue
    well = [point for point in seeds if point.validation is not None]
    choices.append(
      Choice(
        learning_rate=rate,
        validation=float(np.mean([point.validation for point in counting])),
        tests=tuple(point.test for point in well),
        diverged=len(seeds) - len(well),
        parameters=well[0].parameters,
      )
    )
  return max(choices, key=lambda choice: choice.validation, default=None)


def best(points: Sequence[Point]) -> Point | None:
  """The one that is best on validation, of equals that of the lowest rate.

  None where all diverged.
  """
  well = [point for point in points if point.validation is not None]
  return max(
    well, key=lambda point: (point.validation, -point.learning_rate),
    default=None,
  )  # fmt: skip

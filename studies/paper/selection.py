"""Choose learning rates on validation; report on test."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.paper.runs import PaperRun
from studies.paper.trials import StudyTrial, Trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestRate:
  """The learning rate that is best on validation; of equals the lowest."""

  learning_rate: float
  validation: float  # mean accuracy by which it was chosen
  tests: tuple[float, ...]  # accuracy of every seed that did not diverge
  diverged: int  # number of seeds
  parameters: int | None  # trained ones, if known
  examples: int | None = None  # of the test split, if known

  @property
  def test(self) -> float:
    """Mean over seeds."""
    return float(np.mean(self.tests))

  @property
  def spread(self) -> float | None:
    """Highest minus lowest test accuracy; None for one seed."""
    return max(self.tests) - min(self.tests) if len(self.tests) > 1 else None

  @property
  def standard_error(self) -> float | None:
    """Standard error due to the finite test split."""
    if not self.examples:
      return None
    return math.sqrt(self.test * (1 - self.test) / self.examples)


def select(trials: Sequence[StudyTrial], **values: Any) -> list[StudyTrial]:
  """The trials with these values; ones that attend to a task on request."""
  values = {"reads": False, **values}
  return [
    trial
    for trial in trials
    if all(getattr(trial, key) == value for key, value in values.items())
  ]


def choose(
  trials: Sequence[StudyTrial], seed: int | None = None
) -> BestRate | None:
  """Choose by the validation of a seed, or by the mean over seeds.

  A learning rate is excluded if a seed that counts diverged at it.
  """
  choices = []
  for rate in sorted({trial.learning_rate for trial in trials}):
    seeds = [trial for trial in trials if trial.learning_rate == rate]
    counting = [t for t in seeds if seed is None or t.seed == seed]
    known = [t.validation for t in counting if t.validation is not None]
    if len(known) < len(counting):
      continue
    well = [trial for trial in seeds if trial.validation is not None]
    choices.append(
      BestRate(
        learning_rate=rate,
        validation=float(np.mean(known)),
        tests=tuple(trial.test for trial in well if trial.test is not None),
        diverged=len(seeds) - len(well),
        parameters=well[0].parameters,
        examples=well[0].examples,
      )
    )
  return max(choices, key=lambda choice: choice.validation, default=None)


def best(trials: Sequence[StudyTrial]) -> StudyTrial | None:
  """The trial that is best on validation; of equals the lowest rate."""
  well = [trial for trial in trials if trial.validation is not None]
  return max(
    well, key=lambda trial: (trial.validation, -trial.learning_rate),
    default=None,
  )  # fmt: skip


def best_parent(
  read: PaperRun, trials: Trials, cells: int
) -> StudyTrial | None:
  """The trial of a run whose task another run attends to."""
  found = trials[read.name]
  return best([trial for trial in found if trial.cells == cells])

"""Accuracy and cost of a regime on a task."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """Accuracy and cost of a regime on a task."""

  task: str
  regime: str
  # These five are of `ChosenSettings`; validation is None if all diverged.
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  validation: float | None = None
  at_edge: tuple[str, ...] = ()
  tried: int = 0
  diverged: int = 0
  tests: tuple[float, ...] = ()  # accuracies, without seeds that diverged
  seeds: int = 0
  trials: int = 0  # of the search and the final runs
  test_examples: int = 0
  skipped: int = 0  # test images that could not be read
  parameters: int = 0  # trained ones of one task, including the head
  passes: tuple[int, ...] = ()  # `SweepResult.passes` of all runs
  training_seconds: float = 0.0
  wall_seconds: float = 0.0  # of all runs and their tests

  @property
  def test(self) -> float | None:
    """Mean over seeds; None if one of them diverged."""
    if not self.tests or len(self.tests) < self.seeds:
      return None
    return sum(self.tests) / len(self.tests)

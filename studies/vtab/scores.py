"""How good a regime is on a task, and what that took."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """Accuracy of a regime on a task.

  Attributes:
    task: name in the benchmark.
    regime: by which it was learned.
    settings: that were chosen, {"learning_rate": 0.001}.
    validation: accuracy on the 200; None where every setting diverged.
    at_edge: settings that are the least or the greatest tried.
    tried: settings that were tried.
    diverged: how many of these did.
    tests: accuracy of every seed on the test split; those that diverged are
      missing.
    seeds: how many there were.
    trials: tasks that were learned, in search and final runs.
    test_examples: how many images were tested.
    skipped: how many could not be read.
    parameters: trained values of one task, the head among them.
    passes: over the images, as `SweepResult.passes`: of the search, and of each
      final run.
    training_seconds: of all runs.
    wall_seconds: of all runs, with everything, and of their tests.
  """

  task: str
  regime: str
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  validation: float | None = None
  at_edge: tuple[str, ...] = ()
  tried: int = 0
  diverged: int = 0
  tests: tuple[float, ...] = ()
  seeds: int = 0
  trials: int = 0
  test_examples: int = 0
  skipped: int = 0
  parameters: int = 0
  passes: tuple[int, ...] = ()
  training_seconds: float = 0.0
  wall_seconds: float = 0.0

  @property
  def test(self) -> float | None:
    """Mean over seeds; None where one of them diverged."""
    if not self.tests or len(self.tests) < self.seeds:
      return None
    return sum(self.tests) / len(self.tests)

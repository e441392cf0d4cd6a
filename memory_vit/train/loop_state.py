"""State of the loop beside its arrays: best parameters, losses, counts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from memory_vit.kinds.scores import Evaluation, Scores
from memory_vit.runtime import sharding
from memory_vit.train.divergence import SkipCount
from memory_vit.train.step import TrainState

# Any first score is better.
_WORST = -math.inf


@dataclasses.dataclass(frozen=True)
class BestParams:
  """The parameters of a name at its best score on validation.

  Without a validation split the last step is the best, without scores.
  `params` is on the host, None before the first evaluation.
  """

  step: int = 0
  params: Any = None
  scores: Scores = Scores()
  thresholds: tuple[float, ...] = ()  # of labels


@dataclasses.dataclass(frozen=True)
class LoopState:
  """The state of the loop beside step, parameters and optimizer."""

  best: Mapping[str, BestParams]
  # The step at which too many updates in a row of a name were not finite. Its
  # best parameters stay those of an earlier step.
  lost: Mapping[str, int] = dataclasses.field(default_factory=dict)
  skipped: Mapping[str, SkipCount] = dataclasses.field(default_factory=dict)
  # Whether an evaluation is due at this step and not made yet.
  pending: bool = False
  # Of the configuration, from `config_changes.changes`.
  changes: tuple[Mapping[str, Any], ...] = ()
  timed_steps: int = 0
  timed_seconds: float = 0.0


def keep_better(
  best: Mapping[str, BestParams],
  results: Mapping[str, Evaluation],
  state: TrainState,
) -> dict[str, BestParams]:
  """Replace what is now better than ever before; None is never better."""
  return {
    name: _at_now(name, state, results[name])
    if _score(results[name].scores) > _score(found.scores)
    else found
    for name, found in best.items()
  }


def keep_last(
  best: Mapping[str, BestParams], state: TrainState
) -> dict[str, BestParams]:
  """Take the last step as the best of names that have no score."""
  return {
    name: _at_now(name, state) if found.scores.score is None else found
    for name, found in best.items()
  }


def _score(scores: Scores) -> float:
  return _WORST if scores.score is None else scores.score


def _at_now(
  name: str, state: TrainState, result: Evaluation | None = None
) -> BestParams:
  return BestParams(
    int(state.step),
    sharding.to_host(state.params[name]),
    result.scores if result else Scores(),
    result.thresholds if result else (),
  )

"""State of the loop beside its arrays: best parameters, losses, counts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from memory_vit.runtime import sharding
from memory_vit.train import kind_metrics
from memory_vit.train.divergence import SkipCount
from memory_vit.train.step import TrainState

# Any first score is better, unless it is NaN or this.
_WORST = -math.inf


@dataclasses.dataclass(frozen=True)
class BestParams:
  """The parameters of a name at its best score on validation.

  Without a validation split the last step is the best, and the score is None.
  `params` is on the host, None before the first evaluation.
  """

  step: int = 0
  score: float | None = None
  params: Any = None
  loss: float | None = None
  examples: int = 0
  metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
  results: Mapping[str, Mapping[str, Any]],
  state: TrainState,
  kind: str,
) -> dict[str, BestParams]:
  """Replace what is now better than ever before; NaN is never better."""
  return {
    name: dataclasses.replace(
      _at_now(name, results[name], state),
      metrics=kind_metrics.stored(kind, results[name]),
    )
    if results[name]["score"] > (_WORST if found.score is None else found.score)
    else found
    for name, found in best.items()
  }


def keep_last(
  best: Mapping[str, BestParams], state: TrainState
) -> dict[str, BestParams]:
  """Take the last step as the best of names that have no score."""
  return {
    name: _at_now(name, {}, state) if found.score is None else found
    for name, found in best.items()
  }


def _at_now(
  name: str, result: Mapping[str, Any], state: TrainState
) -> BestParams:
  return BestParams(
    int(state.step),
    result.get("score"),
    sharding.to_host(state.params[name]),
    result.get("loss"),
    result.get("examples", 0),
    thresholds=tuple(result.get("thresholds", ())),
  )

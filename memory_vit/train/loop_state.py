"""The part of a run's state that is not in its arrays, saved with them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from memory_vit.runtime import sharding
from memory_vit.train.divergence import SkipCount
from memory_vit.train.step import TrainState

# What a first accuracy is better than, unless it is NaN.
_WORST = -math.inf


@dataclasses.dataclass(frozen=True)
class BestParams:
  """Trained parameters as they were at their best.

  Attributes:
    step: at which that was.
    accuracy: on the validation set; None before the first evaluation, and
      where there is no such set: then the last step is the best.
    params: of one name, on the host; None as long as there is no best.
    loss: on the validation set, with that accuracy.
    examples: of the validation set.
  """

  step: int = 0
  accuracy: float | None = None
  params: Any = None
  loss: float | None = None
  examples: int = 0


@dataclasses.dataclass(frozen=True)
class LoopState:
  """Where the loop stands, beside step, parameters and optimiser.

  Attributes:
    best: {name: its best so far}.
    lost: {name: the step at which too many of its updates in a row were not
      finite}. It is no longer looked at; what was its best before that still
      is.
    skipped: {name: its updates that were not finite}.
    pending: whether an evaluation is due at this step and not made yet.
    changes: of the configuration, from `config_changes.changes`.
    timed_steps: number of steps that were timed.
    timed_seconds: time that these steps took.
  """

  best: Mapping[str, BestParams]
  lost: Mapping[str, int] = dataclasses.field(default_factory=dict)
  skipped: Mapping[str, SkipCount] = dataclasses.field(default_factory=dict)
  pending: bool = False
  changes: tuple[Mapping[str, Any], ...] = ()
  timed_steps: int = 0
  timed_seconds: float = 0.0


def keep_better(
  best: Mapping[str, BestParams],
  results: Mapping[str, Mapping[str, Any]],
  state: TrainState,
) -> dict[str, BestParams]:
  """Replace what is now better than ever before; NaN is never better."""
  return {
    name: _at_now(name, results[name], state)
    if results[name]["top1"]
    > (_WORST if found.accuracy is None else found.accuracy)
    else found
    for name, found in best.items()
  }


def keep_last(
  best: Mapping[str, BestParams], state: TrainState
) -> dict[str, BestParams]:
  """Take the last step as the best of names that have no accuracy."""
  return {
    name: _at_now(name, {}, state) if found.accuracy is None else found
    for name, found in best.items()
  }


def _at_now(
  name: str, result: Mapping[str, Any], state: TrainState
) -> BestParams:
  """The current parameters of a trial as its best, with their validation."""
  return BestParams(
    int(state.step),
    result.get("top1"),
    sharding.to_host(state.params[name]),
    result.get("loss"),
    result.get("examples", 0),
  )

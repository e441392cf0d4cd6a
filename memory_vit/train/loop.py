"""Training loop: steps, logging, evaluation and saved states."""

import collections
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from memory_vit.kinds import find_metric
from memory_vit.kinds.classes import tells_top5
from memory_vit.kinds.scores import Evaluation
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import Interrupted, StopSignal
from memory_vit.train import loop_state
from memory_vit.train.divergence import DivergenceMonitor, Examples
from memory_vit.train.events import Events, Profile
from memory_vit.train.loop_state import BestParams, LoopState
from memory_vit.train.parameters import part_norms
from memory_vit.train.progress import Progress
from memory_vit.train.step import Step, TrainState
from memory_vit.train.wandb_run import WandbRun

logger = logging.getLogger(__name__)

Validate = Callable[[Any], dict[str, Evaluation]]
Save = Callable[[TrainState, LoopState], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """How long to train, and after how many steps events happen; 0 is never.

  The last step is always evaluated and saved. `patience` is the number of
  evaluations without a better one after which training stops.
  """

  total: int
  log: int
  evaluate: int = 0
  checkpoint: int = 0
  profile_at: int = 0
  patience: int = 0

  def due(self, step: int, every: int) -> bool:
    return step == self.total or (every > 0 and step % every == 0)

  def stopped_early(self, step: int, past: LoopState) -> bool:
    """Whether no name became better for `patience` evaluations."""
    if not (self.patience and step and self.due(step, self.evaluate)):
      return False
    since = [b.step for name, b in past.best.items() if name not in past.lost]
    return all(step - best >= self.patience * self.evaluate for best in since)


@dataclasses.dataclass(frozen=True)
class _Monitors:
  divergence: DivergenceMonitor
  progress: Progress
  events: Events
  profile: Profile

  def into(self, past: LoopState) -> LoopState:
    """Add counts and times up to now."""
    timed_steps, timed_seconds = self.progress.timed
    return dataclasses.replace(
      past,
      lost=dict(self.divergence.lost),
      skipped=dict(self.divergence.skipped),
      timed_steps=timed_steps,
      timed_seconds=timed_seconds,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
  """Trains the names of a state side by side."""

  title: str  # of the run, for the progress line
  step_fn: Step
  frozen: Any
  mesh: Mesh
  steps: Steps
  batch_size: int  # of all processes together
  schedules: Mapping[str, optax.Schedule]
  # Parameters -> {name: `evaluate.evaluate`}; the best "score" is kept.
  validate: Validate | None = None
  save: Save | None = None
  # Skipped updates in a row after which a name is lost.
  max_skipped: int = 3
  # Names the examples of a step, for messages.
  examples: Examples | None = None
  stop: StopSignal = dataclasses.field(default_factory=StopSignal)
  # Of events; a name without one writes none.
  logdirs: Mapping[str, Path] = dataclasses.field(default_factory=dict)
  wandb_run: WandbRun | None = None

  def fit(
    self,
    state: TrainState,
    batches: Iterator[dict[str, Any]],
    past: LoopState | None = None,
  ) -> tuple[TrainState, LoopState]:
    """Train from the step of `state`, which is donated, to `steps.total`.

    Returns the last state, and the best parameters of each name. Early stopping
    may end before `steps.total`. `DivergedError` is raised once every name is
    lost, and nothing is saved after that step; until then the others train on
    unchanged. After `Interrupted` the last step is saved.
    """
    first, steps = int(state.step), self.steps
    past = past or LoopState({name: BestParams() for name in state.params})
    with self._monitors(first, past) as monitors:
      # No image beyond the last step is prefetched: it might be broken.
      left = itertools.islice(batches, steps.total - first)
      on_devices = sharding.prefetch(left, self.mesh)
      if past.pending:  # the run was interrupted before this evaluation
        past = self._evaluate_and_save(state, past, monitors, saves=False)
      for step in range(first + 1, steps.total + 1):
        if steps.stopped_early(step - 1, past):
          _show_early_stop(step - 1, past, steps.patience)
          break
        monitors.profile.before(step)
        state, metrics = self.step_fn(state, self.frozen, next(on_devices))
        monitors.divergence.add(metrics)
        monitors.progress.advance()
        monitors.profile.after(step, state)
        self._log(step, state.params, monitors, step == first + 1)
        stopping = self.stop.is_wanted()
        evaluates = steps.due(step, steps.evaluate)
        if stopping or evaluates or steps.due(step, steps.checkpoint):
          past = dataclasses.replace(past, pending=evaluates)
          past = self._evaluate_and_save(state, past, monitors, stopping)
    return state, past

  @contextlib.contextmanager
  def _monitors(self, first: int, past: LoopState) -> Iterator[_Monitors]:
    """Open the monitors; a signal to stop waits until they are closed."""
    total = self.steps.total
    with (
      self.stop.asked_for(),
      contextlib.closing(
        Progress(
          self.title, first, total, self.batch_size, past.timed_steps,
          past.timed_seconds,
        )
      ) as progress,
      Events(self.logdirs, self.wandb_run) as events,
      Profile(self.logdirs, self.steps.profile_at, total) as profile,
    ):  # fmt: skip
      divergence = DivergenceMonitor(
        first, self.title, lost=past.lost, skipped=past.skipped,
        max_skipped=self.max_skipped, examples=self.examples,
      )  # fmt: skip
      yield _Monitors(divergence, progress, events, profile)

  def _evaluate_and_save(
    self,
    state: TrainState,
    past: LoopState,
    monitors: _Monitors,
    stopping: bool = False,
    saves: bool = True,
  ) -> LoopState:
    """Evaluate if that is due and no stop was asked for, and always save.

    Raises `Interrupted` if a stop was asked for, also during the evaluation.
    """
    monitors.divergence.check()  # a lost name must not become the best
    was_timed = monitors.progress.pause()
    if past.pending and not stopping:
      try:
        past = self._evaluate(state, past, monitors)
      except Interrupted:
        stopping = True
    past = monitors.into(past)
    if self.save and saves:
      self.save(state, past)
    if stopping:
      at = f"step {int(state.step)} of {self.title!r} is saved"
      again = f"{self.title} begins again from its first step"
      raise self.stop.interrupted(at if self.save else again)
    if was_timed and int(state.step) < self.steps.total:
      monitors.progress.resume()
    return past

  def _evaluate(
    self, state: TrainState, past: LoopState, monitors: _Monitors
  ) -> LoopState:
    """Update the best parameters of names that are not lost."""
    step, lost = int(state.step), monitors.divergence.lost
    well = {name: b for name, b in past.best.items() if name not in lost}
    if self.validate:
      results = self.validate(state.params)
      _show_validation(step, results, monitors.events)
      well = loop_state.keep_better(well, results, state)
    if step == self.steps.total:
      well = loop_state.keep_last(well, state)
    return dataclasses.replace(past, best={**past.best, **well}, pending=False)

  def _log(
    self, step: int, params: Any, monitors: _Monitors, is_first: bool
  ) -> None:
    """Show the metrics of a step if that is due or overdue."""
    if is_first or self.steps.due(step, self.steps.log):
      shown = self._with_rates(step, monitors.divergence.check())
      self._write(step, params, shown, monitors)
      if is_first:  # compilation has ended
        monitors.progress.resume()
    elif monitors.progress.is_overdue():
      shown = self._with_rates(step, monitors.divergence.newest())
    else:
      return
    line: dict[str, list[float]] = collections.defaultdict(list)
    for values in shown.values():
      for key in ("loss", "accuracy", "mae", "learning_rate"):
        if key in values:
          line[_title(key)].append(values[key])
    monitors.progress.report(line)

  def _write(
    self,
    step: int,
    params: Any,
    shown: Mapping[str, Mapping[str, float]],
    monitors: _Monitors,
  ) -> None:
    """Write metrics of a step, and norms of the parameters after it."""
    if not self.logdirs:
      return
    norms = part_norms(params, shown, self.mesh)
    speed = {"images_per_second": monitors.progress.images_per_second}
    monitors.events.write(
      step,
      {
        name: {
          **{f"train/{key}": value for key, value in values.items()},
          **norms[name],
          **speed,
        }
        for name, values in shown.items()
      },
    )

  def _with_rates(
    self, step: int, metrics: Mapping[str, Mapping[str, float]]
  ) -> dict[str, dict[str, float]]:
    """Add the learning rates of the step to its metrics."""
    return {
      name: {**values, "learning_rate": float(self.schedules[name](step - 1))}
      for name, values in metrics.items()
    }


def _show_early_stop(step: int, past: LoopState, patience: int) -> None:
  best = {name: found.step for name, found in past.best.items()}
  logger.info(
    "stopped early at step %d (config.early_stopping %d): nothing became "
    "better on validation since the steps %s",
    step, patience, best,
  )  # fmt: skip


def _show_validation(
  step: int,
  results: Mapping[str, Evaluation],
  events: Events,
) -> None:
  scalars = {}
  for name, result in results.items():
    scores = result.scores
    numbers = {"loss": scores.loss, **scores.metrics}
    shown = {key: v for key, v in numbers.items() if v is not None}
    line = "  ".join(
      f"{_title(key)} {value:.4f}"
      for key, value in shown.items()
      if key != "top5" or tells_top5(len(scores.per_class or ()))
    )
    logger.info(
      "%s step %d  validation of %d: %s", name, step, scores.examples, line
    )
    scalars[name] = {f"validation/{key}": v for key, v in shown.items()}
  events.write(step, scalars)
  events.flush()


def _title(key: str) -> str:
  metric = find_metric(key)
  return metric.title if metric else key

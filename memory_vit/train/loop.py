"""The training loop: steps, logging, evaluation, checkpoints."""

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

from memory_vit.evaluation.metrics import tells_top5
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

Validate = Callable[[Any], dict[str, dict[str, Any]]]
Save = Callable[[TrainState, LoopState], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """How long to train, and how often what happens; all in steps, 0 is never.

  The last step is evaluated and saved whatever is said here. `patience` is in
  evaluations: after so many in a row without a better one training stops.
  """

  total: int
  log: int
  evaluate: int = 0
  checkpoint: int = 0
  profile_at: int = 0
  patience: int = 0

  def due(self, step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps happens now."""
    return step == self.total or (every > 0 and step % every == 0)

  def stopped_early(self, step: int, past: LoopState) -> bool:
    """Whether no name became better for long, as was seen at this step."""
    if not (self.patience and step and self.due(step, self.evaluate)):
      return False
    since = [b.step for name, b in past.best.items() if name not in past.lost]
    return all(step - best >= self.patience * self.evaluate for best in since)


@dataclasses.dataclass(frozen=True)
class _Monitors:
  """Looks at the steps of one `Loop.fit`."""

  divergence: DivergenceMonitor
  progress: Progress
  events: Events
  profile: Profile

  def into(self, past: LoopState) -> LoopState:
    """Add what was counted and timed by now."""
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
  """Trains the names of a state side by side.

  Attributes:
    title: of the run, for the progress line.
    step_fn: one step.
    frozen: what is read and not trained.
    mesh: over which batches are split.
    steps: how long, and how often what.
    batch_size: of all processes together.
    schedules: learning rate of every name, to be shown.
    validate: params -> {name: `evaluate.evaluate`}; of every name, the state
      with the best "top1" is kept.
    save: (state, past) writes both.
    max_skipped: updates of a name that may be skipped in a row, because they
      are not finite, before it is lost.
    examples: names what the batch of a step holds, for messages.
    stop: is asked after every step.
    logdirs: of TensorBoard events; a name without one writes none.
    wandb_run: that gets the same, if any.
  """

  title: str
  step_fn: Step
  frozen: Any
  mesh: Mesh
  steps: Steps
  batch_size: int
  schedules: Mapping[str, optax.Schedule]
  validate: Validate | None = None
  save: Save | None = None
  max_skipped: int = 3
  examples: Examples | None = None
  stop: StopSignal = dataclasses.field(default_factory=StopSignal)
  logdirs: Mapping[str, Path] = dataclasses.field(default_factory=dict)
  wandb_run: WandbRun | None = None

  def fit(
    self,
    state: TrainState,
    batches: Iterator[dict[str, Any]],
    past: LoopState | None = None,
  ) -> tuple[TrainState, LoopState]:
    """Train from the step of `state` to `steps.total`.

    Args:
      state: where to begin; is used up.
      batches: the rows of this process, from the example at which `state`
        stands.
      past: of the run that is continued.

    Returns:
      The last state, which may be an earlier one than `steps.total` where
      training stops early; and the best of every name, with the time that steps
      took.

    Raises:
      DivergedError: where every name is lost. Nothing is saved after the step
        at which that happened. As long as others are well, they go on: no name
        changes another.
      Interrupted: where it was asked to stop; the last step is saved.
    """
    first, steps = int(state.step), self.steps
    past = past or LoopState({name: BestParams() for name in state.params})
    with self._monitors(first, past) as monitors:
      # No image is read ahead that no step will see: it might be broken.
      left = itertools.islice(batches, steps.total - first)
      on_devices = sharding.prefetch(left, self.mesh)
      if past.pending:  # it was saved when it was interrupted
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
    """Open what looks at the steps after `first`; a signal waits for them."""
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
    """Evaluate if that is due and there is time, and save in any case.

    Raises:
      Interrupted: where it was asked to stop before, or while it evaluated.
    """
    monitors.divergence.check()  # what is lost must not become the best
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
      again = f"{self.title} begins anew"
      raise self.stop.interrupted(at if self.save else again)
    if was_timed and int(state.step) < self.steps.total:
      monitors.progress.resume()
    return past

  def _evaluate(
    self, state: TrainState, past: LoopState, monitors: _Monitors
  ) -> LoopState:
    """Note which names are at their best; a lost one never is again."""
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
    """Show the metrics of a step if that is due, or nothing was for long."""
    if is_first or self.steps.due(step, self.steps.log):
      shown = self._with_rates(step, monitors.divergence.check())
      self._write(step, params, shown, monitors)
      if is_first:  # it has ended, and all that was compiled with it
        monitors.progress.resume()
    elif monitors.progress.is_overdue():
      shown = self._with_rates(step, monitors.divergence.newest())
    else:
      return
    line = collections.defaultdict(list)
    for values in shown.values():
      for key in ("loss", "accuracy", "learning_rate"):
        line[key].append(values[key])
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
    """The metrics of a step with the learning rates that it was taken at."""
    return {
      name: {**values, "learning_rate": float(self.schedules[name](step - 1))}
      for name, values in metrics.items()
    }


def _show_early_stop(step: int, past: LoopState, patience: int) -> None:
  """Log that training stops before its last step, and when it was best."""
  best = {name: found.step for name, found in past.best.items()}
  logger.info(
    "stopped early at step %d (config.early_stopping %d): nothing became "
    "better on validation since the steps %s",
    step, patience, best,
  )  # fmt: skip


def _show_validation(
  step: int, results: Mapping[str, Mapping[str, Any]], events: Events
) -> None:
  """Log the evaluation of a step, and write it for TensorBoard."""
  scalars = {}
  for name, result in results.items():
    shown = {key: result[key] for key in ("loss", "top1", "top5")}
    top5 = f"  top-5 {result['top5']:.4f}" * tells_top5(result)
    logger.info(
      "%s step %d  validation of %d: loss %.4f  top-1 %.4f%s",
      name, step, result["examples"], result["loss"], result["top1"], top5,
    )  # fmt: skip
    scalars[name] = {f"validation/{key}": v for key, v in shown.items()}
  events.write(step, scalars)
  events.flush()

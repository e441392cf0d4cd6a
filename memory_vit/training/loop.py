"""The training loop: steps, and what is seen and saved on the way."""

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from memory_vit.evaluation.metrics import tells_top5
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import Interrupted, Stop
from memory_vit.training.divergence import Examples, Skipped, Watch
from memory_vit.training.events import Events, Profile
from memory_vit.training.progress import Progress
from memory_vit.training.step import Step, TrainState

logger = logging.getLogger("memory_vit")

Validate = Callable[[Any], dict[str, dict[str, Any]]]
# What a first accuracy is better than, unless it is NaN.
_WORST = -math.inf
Save = Callable[[TrainState, "Past"], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """How long to train, and how often what happens; all in steps, 0 is never.

  The last step is evaluated and saved whatever is said here.
  """

  total: int
  log: int
  evaluate: int = 0
  checkpoint: int = 0
  profile_at: int = 0

  def due(self, step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps happens now."""
    return step == self.total or (every > 0 and step % every == 0)


@dataclasses.dataclass(frozen=True)
class Best:
  """Trained parameters as they were at their best.

  Attributes:
    step: at which that was.
    accuracy: on the validation set; None before the first evaluation, and
      where there is no such set: then the last step is the best.
    params: of one name, on the host; None as long as there is no best.
  """

  step: int = 0
  accuracy: float | None = None
  params: Any = None


@dataclasses.dataclass(frozen=True)
class Past:
  """What a run did before it was interrupted, beside its state.

  Attributes:
    best: {name: its best so far}.
    lost: {name: the step at which too many of its updates in a row were not
      finite}. It is no longer looked at; what was its best before that still
      is.
    skipped: {name: its updates that were not finite}.
    pending: whether the run was interrupted before the evaluation that was due
      at its last step.
    changes: of the configuration, from `config_changes.changes`.
    timed_steps: steps that were timed, and in how many seconds.
    timed_seconds: see there.
  """

  best: dict[str, Best]
  lost: dict[str, int] = dataclasses.field(default_factory=dict)
  skipped: dict[str, Skipped] = dataclasses.field(default_factory=dict)
  pending: bool = False
  changes: tuple[Mapping[str, Any], ...] = ()
  timed_steps: int = 0
  timed_seconds: float = 0.0


def fit(
  step_fn: Step,
  state: TrainState,
  frozen: Any,
  batches: Iterator[dict[str, np.ndarray]],
  *,
  title: str,
  steps: Steps,
  batch_size: int,
  mesh: Mesh,
  schedules: dict[str, optax.Schedule],
  past: Past | None = None,
  validate: Validate | None = None,
  save: Save | None = None,
  max_skipped: int = 3,
  examples: Examples | None = None,
  stop: Stop | None = None,
  logdirs: Mapping[str, Path] = types.MappingProxyType({}),
) -> tuple[TrainState, Past]:
  """Trains from the step of `state` to `steps.total`.

  Args:
    step_fn: one step.
    state: where to begin; is used up.
    frozen: what is read and not trained.
    batches: the rows of this process, from the example at which `state` stands.
    title: of the run, for the progress line.
    steps: how long, and how often what.
    batch_size: of all processes together.
    mesh: over which batches are split.
    schedules: learning rate of every name, to be shown.
    past: of the run that is continued.
    validate: params -> {name: `evaluate.evaluate`}; of every name, the
      state with the best "top1" is kept.
    save: (state, past) writes both.
    max_skipped: updates of a name that may be skipped in a row, because they
      are not finite, before it is lost.
    examples: names what the batch of a step holds, for messages.
    stop: is asked after every step.
    logdirs: of TensorBoard events; a name without one writes none.

  Returns:
    The last state; and the best of every name, with the time that steps took.

  Raises:
    DivergedError: where every name is lost. Nothing is saved after the step at
      which that happened. As long as others are well, they go on: no name
      changes another.
    Interrupted: where it was asked to stop; the last step is saved.
  """
  first = int(state.step)
  past = past or Past({name: Best() for name in state.params})
  stop = stop or Stop()
  watch = Watch(first, title, lost=past.lost, skipped=past.skipped,
                max_skipped=max_skipped, examples=examples)  # fmt: skip
  progress = Progress(title, first, steps.total, batch_size, past.timed_steps,
                      past.timed_seconds)  # fmt: skip
  best = dict(past.best)

  def so_far(pending: bool) -> Past:
    timed_steps, timed_seconds = progress.timed
    return dataclasses.replace(
      past, best=best, lost=watch.lost, skipped=watch.skipped, pending=pending,
      timed_steps=timed_steps, timed_seconds=timed_seconds,
    )  # fmt: skip

  def evaluate_now(step: int) -> None:
    well = [name for name in best if name not in watch.lost]
    if validate:
      accuracies = _validate(step, state, validate, events)
      best.update(
        _better({name: best[name] for name in well}, accuracies, state)
      )
    if step == steps.total:
      best.update(_last({name: best[name] for name in well}, state))

  def evaluate_and_save(step: int, evaluates: bool, stopping: bool) -> None:
    """Evaluates if that is due and there is time, and saves in any case."""
    watch.check()  # what is lost must not become the best
    progress.pause()
    if evaluates and not stopping:
      try:
        evaluate_now(step)
        evaluates = False
      except Interrupted:
        stopping = True
    if save and step > first:  # that one was saved when it was interrupted
      save(state, so_far(pending=evaluates))
    if stopping:
      raise stop.interrupted(f"step {step} of {title!r} is saved" if save else
                             f"{title} begins anew")  # fmt: skip
    if step < steps.total:
      progress.resume()

  with contextlib.ExitStack() as stack:
    stack.enter_context(stop.asked_for())
    stack.callback(progress.close)
    events = stack.enter_context(Events(logdirs))
    profile = stack.enter_context(
      Profile(logdirs, steps.profile_at, steps.total)
    )
    # No picture is read ahead that no step will see: it might be broken.
    batches = itertools.islice(batches, steps.total - first)
    batches = sharding.prefetch(batches, mesh)
    if past.pending:
      evaluate_and_save(first, evaluates=True, stopping=False)
    for step in range(first + 1, steps.total + 1):
      profile.before(step)
      state, metrics = step_fn(state, frozen, next(batches))
      watch.add(metrics)
      progress.advance()
      profile.after(step, state)
      if step == first + 1 or steps.due(step, steps.log):
        _log(step, watch.check(), schedules, progress, events)
      elif progress.is_overdue():
        progress.report(_shown(step, watch.newest(), schedules))
      stopping, evaluates = stop.is_wanted(), steps.due(step, steps.evaluate)
      if stopping or evaluates or steps.due(step, steps.checkpoint):
        evaluate_and_save(step, evaluates, stopping)
  return state, so_far(pending=False)


def _better(
  best: Mapping[str, Best], accuracies: Mapping[str, float], state: TrainState
) -> dict[str, Best]:
  """The names that are now better than ever before; NaN is never better."""
  return {
    name: _now(name, accuracies[name], state)
    for name, found in best.items()
    if accuracies[name] > (_WORST if found.accuracy is None else found.accuracy)
  }


def _last(best: Mapping[str, Best], state: TrainState) -> dict[str, Best]:
  """Names that were never evaluated are best at the last step."""
  return {
    name: _now(name, None, state)
    for name, found in best.items()
    if found.accuracy is None
  }


def _now(name: str, accuracy: float | None, state: TrainState) -> Best:
  """A name as it is."""
  return Best(int(state.step), accuracy, sharding.to_host(state.params[name]))


def _log(
  step: int,
  metrics: dict[str, dict[str, float]],
  schedules: dict[str, optax.Schedule],
  progress: Progress,
  events: Events,
) -> None:
  """Shows the metrics of a step, and writes them for TensorBoard."""
  for name, values in metrics.items():
    values = {**values, "learning_rate": float(schedules[name](step - 1))}
    scalars = {f"train/{key}": value for key, value in values.items()}
    speed = {"images_per_second": progress.images_per_second}
    events.write(name, step, scalars | speed)
  progress.report(_shown(step, metrics, schedules))


def _shown(
  step: int,
  metrics: Mapping[str, Mapping[str, float]],
  schedules: Mapping[str, optax.Schedule],
) -> dict[str, list[float]]:
  """What the progress line says of a step: of each number that of all names."""
  shown = collections.defaultdict(list)
  for name, values in metrics.items():
    rate = float(schedules[name](step - 1))
    for key in ("loss", "accuracy"):
      shown[key].append(values[key])
    shown["learning_rate"].append(rate)
  return shown


def _validate(
  step: int, state: TrainState, validate: Validate, events: Events
) -> dict[str, float]:
  """Evaluates a state; returns the accuracy of every name."""
  results = validate(state.params)
  for name, result in results.items():
    shown = {key: result[key] for key in ("loss", "top1", "top5")}
    top5 = f"  top-5 {result['top5']:.4f}" * tells_top5(result)
    logger.info(
      "%s step %d  validation of %d: loss %.4f  top-1 %.4f%s",
      name, step, result["examples"], result["loss"], result["top1"], top5,
    )  # fmt: skip
    events.write(
      name, step, {f"validation/{key}": v for key, v in shown.items()}
    )
  events.flush()
  return {name: result["top1"] for name, result in results.items()}

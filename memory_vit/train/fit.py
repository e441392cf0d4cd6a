"""Train or resume a pack of trials, which share a forward pass."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from memory_vit.kinds import TaskKind, find_metric
from memory_vit.kinds.classes import tells_top5
from memory_vit.kinds.scores import Evaluation
from memory_vit.model.task import Task
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import Interrupted, StopSignal
from memory_vit.train import batches, calibrate, padded_head, parameters
from memory_vit.train import state as state_lib
from memory_vit.train.checkpoints import Checkpoints
from memory_vit.train.closed_form import ClosedFormStep
from memory_vit.train.divergence import DivergenceMonitor, Examples
from memory_vit.train.evaluate import validate
from memory_vit.train.inputs import RunInputs
from memory_vit.train.metric_writers import MetricWriters
from memory_vit.train.pack import Start, start
from memory_vit.train.profile import Profile
from memory_vit.train.progress import Progress
from memory_vit.train.state import BestParams, LoopState, Steps
from memory_vit.train.step import TrainState
from memory_vit.train.sweep import PassPlan, Trial

logger = logging.getLogger(__name__)

NO_WRITERS = MetricWriters()
# Metrics that the progress line of a step shows.
_IN_LINES = (
  "loss", "accuracy", "mae", "learning_rate", "shrinkage", "penalty",
)  # fmt: skip
Metrics = Mapping[str, Mapping[str, float]]
# Function from the parameters of all trials to {trial: evaluation}.
Evaluate = Callable[[Any], dict[str, Evaluation]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackResult:
  """A pack after training; the keys of its mappings are names of trials."""

  # {trial: its task, with the parameters that scored best on validation}. A
  # trial that was lost before the first evaluation has no task.
  tasks: dict[str, Task]
  best: Mapping[str, BestParams]
  # {trial: step at which it was lost after too many skipped updates in a row}.
  lost: Mapping[str, int]
  # {trial: number of updates that were skipped because they were not finite}.
  skipped: dict[str, int] = dataclasses.field(default_factory=dict)
  # Changes of options and data since the run first started.
  changes: tuple[Mapping[str, Any], ...] = ()
  steps: int = 0
  # Number of training images in all timed steps, and the time of these steps.
  examples: int = 0
  seconds: float = 0.0


def fit_pack(
  inputs: RunInputs,
  trials: Sequence[Trial],
  directory: Path,
  *,
  plan: PassPlan | None = None,
  writers: MetricWriters = NO_WRITERS,
  profile_dir: Path | None = None,
  allow_changed_data: bool = False,
  accepted: Callable[[], None] = lambda: None,
  require_alone: Callable[[], None] = lambda: None,
) -> PackResult:
  """Train the trials of a pack, or resume if `directory` has a saved state.

  Args:
    inputs: inputs of the run.
    trials: trials of one group, see `sweep.by_pass_group`.
    directory: directory of the saved states.
    plan: plan to save with each state; None if the run has no other pack.
    writers: writers of metrics and norms.
    profile_dir: directory for the profile of `config.profile_at`.
    allow_changed_data: see `state.resume`.
    accepted: called once all checks have passed, before the first step, so that
      a refused start leaves the files of an earlier run unchanged.
    require_alone: raises if another run may be using the directory; all
      processes call it before a state is saved.
  """
  config = inputs.config
  began = start(inputs, trials)
  tasks = began.tasks
  _show_parameters(inputs, began.state.params)
  plan = plan or PassPlan((tuple(tasks),))
  steps = Steps(
    total=config.total_steps,
    log=config.log_every,
    evaluate=config.eval_every,
    checkpoint=config.checkpoint_every,
    profile_at=config.profile_at,
    patience=config.early_stopping,
  )
  trained_on = ("train", "validation")
  splits = {key: s for key, s in inputs.splits.items() if key in trained_on}
  with Checkpoints(directory) as checkpoints:
    meta = state_lib.describe(inputs, trials)
    state, past = state_lib.resume(
      checkpoints,
      began.state,
      meta,
      splits,
      steps,
      inputs.record,
      allow_changed_data,
    )
    inputs.record.keep()
    accepted()
    is_new = past is None
    if is_new and inputs.first_head:  # evaluate the loaded head before step 1
      none = {name: BestParams() for name in tasks}
      past = LoopState(none, pending="validation" in inputs.splits)

    def save(state: TrainState, past: LoopState) -> None:
      require_alone()
      saved = {**meta, "plan": dataclasses.asdict(plan)}
      state_lib.save(checkpoints, state, past, saved, splits)

    state, past = fit(
      began.step,
      state,
      batches.train_batches(inputs, int(state.step)),
      past,
      title=trials[0].name if len(trials) == 1 else f"{len(trials)} trials",
      frozen=inputs.frozen,
      mesh=inputs.mesh,
      steps=steps,
      batch_size=config.batch_size,
      evaluate=_evaluation(inputs, began),
      save=save,
      max_skipped=config.optim.max_skipped,
      examples=functools.partial(batches.train_examples, inputs),
      stop=inputs.stop,
      writers=writers,
      profile_dir=profile_dir,
      saves_first=is_new,
    )
  best = {n: b.params for n, b in past.best.items() if b.params is not None}
  kinds = calibrate.fitted_kinds(inputs, began, best)
  return PackResult(
    tasks=_best_tasks(inputs, tasks, best, kinds),
    best=past.best,
    lost=past.lost,
    skipped={name: count.total for name, count in past.skipped.items()},
    changes=past.changes,
    steps=int(state.step),
    examples=past.timed_steps * config.batch_size,
    seconds=past.timed_seconds,
  )


def fit(
  step_fn: Callable[[TrainState, Any, dict[str, Any]], tuple[TrainState, Any]],
  state: TrainState,
  train_batches: Iterator[dict[str, Any]],
  past: LoopState | None = None,
  *,
  title: str,
  frozen: Any,
  mesh: Mesh,
  steps: Steps,
  batch_size: int,
  evaluate: Evaluate | None = None,
  save: Callable[[TrainState, LoopState], None] | None = None,
  max_skipped: int = 3,
  examples: Examples | None = None,
  stop: StopSignal | None = None,
  writers: MetricWriters = NO_WRITERS,
  profile_dir: Path | None = None,
  saves_first: bool = False,
) -> tuple[TrainState, LoopState]:
  """Train `state`, which is donated, up to step `steps.total`.

  `evaluate` takes the parameters of all trials; the loop keeps each trial's
  parameters with the best score. `batch_size` counts images of all processes.
  After `max_skipped` skipped updates in a row, a trial is lost. `examples`
  returns the names of a step's examples. `saves_first` says whether to save
  `state` once it is evaluated; a restored state is saved already.

  Return the last state, and the best parameters of each trial. Early stopping
  may end training before `steps.total`. Raise `DivergedError` once every trial
  is lost, without saving that step; lost trials do not affect the others. The
  last step is saved before `Interrupted` is raised.
  """
  first, stop = int(state.step), stop or StopSignal()
  past = past or LoopState({name: BestParams() for name in state.params})
  divergence = DivergenceMonitor(
    first, title, lost=past.lost, skipped=past.skipped,
    max_skipped=max_skipped, examples=examples,
  )  # fmt: skip
  progress = Progress(
    title, first, steps.total, batch_size, past.timed_steps, past.timed_seconds
  )

  def evaluate_and_save(
    step: int, past: LoopState, stopping: bool, saves: bool = True
  ) -> LoopState:
    """Evaluate if due, and save; if `stopping`, only save, then raise."""
    divergence.check()  # a diverged trial must not become the best
    was_timed = progress.pause()
    if past.pending and not stopping:
      well = {n: b for n, b in past.best.items() if n not in divergence.lost}
      try:
        if evaluate:
          evaluated = evaluate(state.params)
          _show_validation(step, evaluated, writers)
          well = state_lib.keep_better(well, evaluated, state)
        if step == steps.total:
          well = state_lib.keep_last(well, state)
        past = dataclasses.replace(
          past, best={**past.best, **well}, pending=False
        )
      except Interrupted:
        stopping = True
    timed_steps, timed_seconds = progress.timed
    past = dataclasses.replace(
      past,
      lost=dict(divergence.lost),
      skipped=dict(divergence.skipped),
      timed_steps=timed_steps,
      timed_seconds=timed_seconds,
    )
    if save and saves:
      save(state, past)
    if stopping:
      saved = f"step {step} of {title!r} is saved"
      again = f"{title} begins again from its first step"
      raise stop.interrupted(saved if save else again)
    if was_timed and step < steps.total:
      progress.resume()
    return past

  with (
    # `stop` may raise on exit, so it must exit last, and be entered first.
    stop.asked_for(),
    contextlib.closing(progress),
    Profile(profile_dir, steps.profile_at, steps.total) as profile,
  ):
    # Prefetch only images that will be used: an unused image might be broken.
    left = itertools.islice(train_batches, steps.total - first)
    on_devices = sharding.prefetch(left, mesh)
    if past.pending:  # the state at step `first` is not evaluated yet
      past = evaluate_and_save(first, past, stopping=False, saves=saves_first)
    for step in range(first + 1, steps.total + 1):
      if steps.stops_early(step - 1, past.best_steps):
        _show_early_stop(step - 1, past, steps.patience)
        break
      profile.before(step)
      state, metrics = step_fn(state, frozen, next(on_devices))
      divergence.add(metrics)
      progress.advance()
      profile.after(step, state)

      is_first = step == first + 1
      if is_first or steps.due(step, steps.log):
        shown = divergence.check()
        if writers:
          speed = progress.images_per_second
          norms = parameters.part_norms(state.params, shown, mesh)
          writers.write_scalars(step, _scalars(shown, norms, speed))
        if is_first:  # start the clock after compilation
          progress.resume()
        progress.report(_line(shown))
      elif progress.is_overdue():
        progress.report(_line(divergence.newest()))

      stopping = stop.is_wanted()
      evaluates = steps.due(step, steps.evaluate)
      if stopping or evaluates or steps.due(step, steps.checkpoint):
        past = dataclasses.replace(past, pending=evaluates)
        past = evaluate_and_save(step, past, stopping)
    writers.flush()
  return state, past


def _evaluation(inputs: RunInputs, began: Start) -> Evaluate | None:
  """Return a function that evaluates trials during training, or None.

  The function evaluates on the validation split. If the run has no such split,
  heads in closed form are cross-validated; for other trials, return None.
  """
  if "validation" in inputs.splits:
    return functools.partial(validate, inputs, began.tasks)
  if isinstance(began.step, ClosedFormStep):
    step = began.step
    return lambda params: step.cross_validation
  return None


def _best_tasks(
  inputs: RunInputs,
  tasks: Mapping[str, Task],
  best: Mapping[str, Any],
  kinds: Mapping[str, TaskKind],
) -> dict[str, Task]:
  """Return {trial: task}, with best parameters and without padding outputs."""
  names = inputs.splits["train"].class_names
  return {
    name: padded_head.without_padding(
      dataclasses.replace(tasks[name], params=params), names, kinds[name]
    )
    for name, params in best.items()
  }


def _show_parameters(inputs: RunInputs, params: Any) -> None:
  if logger.isEnabledFor(logging.DEBUG):
    logger.debug("\n%s", parameters.parameter_table(params))
  frozen = {k: v for k, v in inputs.frozen.items() if k != "outputs"}
  if inputs.config.learned.holds_backbone:
    frozen["backbone"] = {}
  logger.info("%s", parameters.parameter_counts(params, frozen))


def _scalars(metrics: Metrics, norms: Metrics, speed: float) -> Metrics:
  """Return {trial: {tag: number}} of a step: metrics, norms and speed."""
  return {
    name: {
      **{f"train/{key}": value for key, value in values.items()},
      **norms[name],
      "images_per_second": speed,
    }
    for name, values in metrics.items()
  }


def _line(metrics: Metrics) -> dict[str, list[float]]:
  """Return {title of a metric: [its value for each trial]}."""
  line: dict[str, list[float]] = collections.defaultdict(list)
  for values in metrics.values():
    for key in _IN_LINES:
      if key in values:
        line[_title(key)].append(values[key])
  return line


def _show_early_stop(step: int, past: LoopState, patience: int) -> None:
  best = {name: b.step for name, b in past.best.items()}
  logger.info(
    "stopped early at step %d (config.early_stopping %d): validation has not "
    "improved since the steps %s",
    step, patience, best,
  )  # fmt: skip


def _show_validation(
  step: int, evaluated: Mapping[str, Evaluation], writers: MetricWriters
) -> None:
  scalars = {}
  for name, result in evaluated.items():
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
  writers.write_scalars(step, scalars)
  writers.flush()


def _title(key: str) -> str:
  metric = find_metric(key)
  return metric.title if metric else key

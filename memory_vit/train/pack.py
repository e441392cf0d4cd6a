"""Train a pack of trials, which share a forward pass, or resume one."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.data.split import Split
from memory_vit.kinds.scores import Evaluation
from memory_vit.model.task import Task
from memory_vit.tasks.compose import require_fit
from memory_vit.train import optim, padded_head, parameters, resume
from memory_vit.train.checkpoints import Checkpoints
from memory_vit.train.loop import Loop, Save, Steps
from memory_vit.train.loop_state import BestParams, LoopState
from memory_vit.train.step import Step, TrainState, create_state
from memory_vit.train.sweep import PassPlan, Trial
from memory_vit.train.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackResult:
  """A pack after training; its mappings are by the name of the trial."""

  # With the best parameters on validation; without trials that were lost
  # before their first evaluation.
  tasks: dict[str, Task]
  best: Mapping[str, BestParams]
  # The step at which too many updates in a row were not finite.
  lost: Mapping[str, int]
  # The number of updates that were not finite.
  skipped: dict[str, int] = dataclasses.field(default_factory=dict)
  # Of the configuration, from `config_changes.changes`.
  changes: tuple[Mapping[str, Any], ...] = ()
  steps: int = 0
  # Training images in the timed steps, and the time of these steps.
  examples: int = 0
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Start:
  """A pack before its first step; its mappings are by the name of the trial."""

  tasks: dict[str, Task]
  schedules: dict[str, Any]
  step: Step
  state: TrainState


def train_pack(
  trainer: Trainer,
  trials: Sequence[Trial],
  directory: Path,
  logdirs: Mapping[str, Path],
  plan: PassPlan | None = None,
) -> PackResult:
  """Train the trials of a pack, or resume if `directory` has a saved state.

  `plan` is saved with each state; None if this is the only pack of the run.
  """
  initial = start(trainer, trials)
  params = initial.state.params
  if logger.isEnabledFor(logging.DEBUG):
    logger.debug("\n%s", parameters.parameter_table(params))
  logger.info("%s", parameters.parameter_counts(params, trainer.untouched()))
  with Checkpoints(directory) as checkpoints:
    plan = plan or PassPlan((tuple(initial.tasks),))
    steps, past = _fit(trainer, trials, initial, checkpoints, logdirs, plan)
  tasks = {
    name: padded_head.without_padding(
      dataclasses.replace(task, params=past.best[name].params),
      trainer.train.class_names,
      dataclasses.replace(
        trainer.task_kind, thresholds=past.best[name].thresholds
      ),
    )
    for name, task in initial.tasks.items()
    if past.best[name].params is not None
  }
  return PackResult(
    tasks=tasks,
    best=past.best,
    lost=past.lost,
    skipped={name: found.total for name, found in past.skipped.items()},
    changes=past.changes,
    steps=steps,
    examples=past.timed_steps * trainer.config.batch_size,
    seconds=past.timed_seconds,
  )


def _fit(
  trainer: Trainer,
  trials: Sequence[Trial],
  initial: Start,
  checkpoints: Checkpoints,
  logdirs: Mapping[str, Path],
  plan: PassPlan,
) -> tuple[int, LoopState]:
  """Take the remaining steps; return the number of steps of the whole run."""
  meta = trainer.meta(trials)
  trained_on = ("train", "validation")
  splits = {k: r for k, r in trainer.splits.items() if k in trained_on}
  state, past = resume.resume(
    checkpoints,
    initial.state,
    meta,
    splits,
    trainer.context.allow_changed_data,
    trainer.record,
  )
  resume.require_within(
    state, trainer.config.total_steps, checkpoints.directory
  )
  # Only now: a refused start changes nothing of an earlier run.
  trainer.record.keep()
  if trainer.wandb_run:
    trainer.wandb_run.begin()

  def save(state: TrainState, past: LoopState) -> None:
    trainer.context.require_alone()
    saved = {**meta, "plan": dataclasses.asdict(plan)}
    resume.save(checkpoints, state, past, saved, splits)

  many = f"{len(trials)} trials"
  title = trials[0].name if len(trials) == 1 else many
  batches = trainer.train_batches(initial.step, int(state.step))
  loop = _loop(trainer, initial, title, save, logdirs)
  state, past = loop.fit(state, batches, past)
  return int(state.step), past


def _loop(
  trainer: Trainer,
  initial: Start,
  title: str,
  save: Save,
  logdirs: Mapping[str, Path],
) -> Loop:
  config = trainer.config
  validate = None
  if trainer.validation:
    validate = functools.partial(
      _validate, trainer, initial, trainer.validation
    )
  return Loop(
    title=title,
    step_fn=initial.step,
    frozen=trainer.frozen(),
    mesh=trainer.context.mesh,
    steps=Steps(
      total=config.total_steps,
      log=config.log_every,
      evaluate=config.eval_every,
      checkpoint=config.checkpoint_every,
      profile_at=config.profile_at,
      patience=config.early_stopping,
    ),
    batch_size=config.batch_size,
    schedules=initial.schedules,
    validate=validate,
    save=save,
    max_skipped=config.optim.max_skipped,
    examples=trainer.train_examples,
    stop=trainer.context.stop,
    logdirs=logdirs,
    wandb_run=trainer.wandb_run,
  )


def start(trainer: Trainer, trials: Sequence[Trial]) -> Start:
  """Initialize a pack and its step; nothing is compiled yet."""
  tasks = {t.name: trainer.new_task(t) for t in trials}
  step = trainer.make_step(trials, tasks)
  if trainer.config.learned.composes:  # other regimes attend to no task
    require_fit([*trainer.parents, *tasks.values()])
  schedules = {
    t.name: optim.make_schedule(
      t.config.optim, t.config.learning_rate, trainer.config.total_steps
    )
    for t in trials
  }
  params = {name: task.params for name, task in tasks.items()}
  state = create_state(params, step.optimizer, trainer.context.mesh)
  return Start(tasks, schedules, step, state)


def _validate(
  trainer: Trainer, initial: Start, split: Split, params: Any
) -> dict[str, Evaluation]:
  trained = [
    dataclasses.replace(task, params=params[name])
    for name, task in initial.tasks.items()
  ]
  if not trainer.cache:
    return trainer.evaluate(trained, split)
  prepare = trainer.frozen_pass(initial.step)
  batches = trainer.cache.eval_batches(split, prepare)
  return trainer.evaluate(trained, split, batches)

"""Initialize packs of trials, which share a forward pass."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from memory_vit.config import data_seed
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.model.task import Task
from memory_vit.runtime import sharding
from memory_vit.tasks import create
from memory_vit.tasks.compose import require_fit
from memory_vit.train.closed_form import ClosedFormStep
from memory_vit.train.inputs import RunInputs
from memory_vit.train.loss import HeadLoss
from memory_vit.train.mix import Mixup
from memory_vit.train.step import (
  Step,
  StepPlan,
  TrainState,
  shared_step,
)
from memory_vit.train.sweep import Trial


@dataclasses.dataclass(frozen=True)
class Start:
  """A pack before its first step; `tasks` is {trial name: task}."""

  tasks: dict[str, Task]
  step: Step | ClosedFormStep
  state: TrainState


def start(inputs: RunInputs, trials: Sequence[Trial]) -> Start:
  """Initialize a pack and its step; nothing is compiled yet."""
  tasks = {trial.name: create_task(inputs, trial) for trial in trials}
  step: Step | ClosedFormStep
  if inputs.config.optim.in_closed_form:
    step = ClosedFormStep(inputs, trials)
  else:
    step = make_step(inputs, trials, tasks)
  # Tasks without a token need no check: they never attend to earlier tasks.
  if inputs.config.learned.has_token:
    require_fit([*inputs.parents, *tasks.values()])
  params = {name: task.params for name, task in tasks.items()}
  state = step.create_state(params)
  return Start(tasks, step, state)


def shapes(
  inputs: RunInputs, trials: Sequence[Trial]
) -> tuple[Step, TrainState]:
  """Return the step of a pack, and the shapes of its state on the mesh."""
  tasks = {trial.name: create_task(inputs, trial) for trial in trials}
  step = make_step(inputs, trials, tasks)
  state = jax.eval_shape(
    lambda params: TrainState(
      jnp.int32(0), params, step.optimizer.init(params)
    ),
    {name: task.params for name, task in tasks.items()},
  )
  return step, sharding.shapes(state, inputs.mesh)


def create_task(inputs: RunInputs, trial: Trial) -> Task:
  """Return the initialized task of a trial."""
  config, train = trial.config, inputs.splits["train"]
  regime, options = config.learned, config.task
  padded = inputs.config.task.padded_classes
  task = create.init_task(
    jax.random.key(config.seed),
    inputs.backbone,
    name=trial.name,
    num_classes=padded or train.num_classes,
    # A padded head gets its class names and kind only after training.
    kind=CLASSES if padded else inputs.kind,
    regime=config.regime,
    **{field: getattr(options, field) for field in regime.fields},
    attends_to=inputs.attends_to,
    memory_norm=options.memory_norm,
    memory_std=options.memory_std,
    cls_init=options.cls_init,
    class_names=() if padded else train.class_names,
    preprocessing=inputs.preprocessing,
  )
  if inputs.first_head is None:
    return task
  return _with_head(task, inputs.first_head, inputs.kind)


def _with_head(task: Task, first: Task, stated: TaskKind) -> Task:
  """Return `task` with the head of `first`; padding outputs remain zero.

  The head is converted for the loss of this run: its temperature becomes 1. A
  head for values is changed to predict them in standard deviations of this
  run's training split.
  """
  classes, kind = first.spec.num_classes, first.spec.kind
  kernel, bias = kind.kind.head_for_training(
    kind, stated, *(first.params["head"][key] for key in ("kernel", "bias"))
  )
  head = {
    key: task.params["head"][key].at[..., :classes].set(values)
    for key, values in (("kernel", kernel), ("bias", bias))
  }
  return dataclasses.replace(task, params={**task.params, "head": head})


def make_step(
  inputs: RunInputs, trials: Sequence[Trial], tasks: Mapping[str, Task]
) -> Step:
  """Return the optimizer step of a pack, from the cache of `shared_step`."""
  config = inputs.config
  mixup = None
  if config.optim.mixup:
    mixup = Mixup(config.optim.mixup, data_seed(config))
  specs = (task.spec for task in (*inputs.parents, *tasks.values()))
  return shared_step(
    StepPlan(
      backbone=inputs.backbone.config,
      specs=tuple(spec.for_programs for spec in specs),
      optimizers=tuple(
        (t.name, t.config.optim, t.config.learning_rate) for t in trials
      ),
      losses=tuple((t.name, HeadLoss.of(t.config)) for t in trials),
      total_steps=config.total_steps,
      mixup=mixup,
      accumulation_steps=config.optim.accumulation_steps,
      mesh=inputs.mesh,
    )
  )

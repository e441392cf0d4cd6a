"""Compiled steps that runs of one process share."""

import dataclasses
import functools

from jax.sharding import Mesh

from memory_vit.config import OptimConfig
from memory_vit.model.task import TaskSpec
from memory_vit.model.vit_config import ViTConfig
from memory_vit.tasks.split_forward import make_split_forward
from memory_vit.train import optim
from memory_vit.train.mixup import Mixup
from memory_vit.train.step import Step

# A study has no more steps than that which come again.
_KEPT = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """All that the programs of a step depend on, but for arrays.

  Attributes:
    backbone: shape and computation of the backbone.
    specs: of all tasks, as `without_classes` leaves them.
    optimizers: of each trained task its name, options and learning rate.
    total_steps: of the run.
    mixup: how images are mixed; None where they are not.
    accumulation_steps: parts of a batch.
    mesh: over which batches are split.
  """

  backbone: ViTConfig
  specs: tuple[TaskSpec, ...]
  optimizers: tuple[tuple[str, OptimConfig, float], ...]
  total_steps: int
  mixup: Mixup | None
  accumulation_steps: int
  mesh: Mesh


@functools.lru_cache(_KEPT)
def shared_step(plan: StepPlan) -> Step:
  """Build the step of a plan once: another run with it compiles nothing.

  Raises:
    TaskError: for tasks that cannot share a pass.
  """
  options = {name: config for name, config, _ in plan.optimizers}
  schedules = {
    name: optim.make_schedule(config, rate, plan.total_steps)
    for name, config, rate in plan.optimizers
  }
  return Step(
    make_split_forward(plan.backbone, plan.specs),
    optim.make_optimizer(options, schedules),
    plan.mesh,
    label_smoothing={n: o.label_smoothing for n, o in options.items()},
    weighted=tuple(
      n for n, o in options.items() if o.class_weights == "balanced"
    ),
    mixup=plan.mixup,
    accumulation_steps=plan.accumulation_steps,
  )


def without_classes(spec: TaskSpec) -> TaskSpec:
  """A specification without the names of classes: no program knows them."""
  return dataclasses.replace(spec, class_names=())

"""Learning-rate schedule and optimiser: one of its own for every task."""

from collections.abc import Mapping

import optax

from memory_vit.config import OptimConfig


def make_schedule(
  config: OptimConfig, learning_rate: float, total_steps: int
) -> optax.Schedule:
  """Linear warm-up to `learning_rate`, then cosine to zero or constant.

  Args:
    config: `warmup` is the share of the steps; the first step is not at zero.
    learning_rate: the peak.
    total_steps: of the run.

  Returns:
    Step (from 0) -> learning rate.
  """
  warmup = int(config.warmup * total_steps)
  if config.schedule == "cosine":
    after = optax.cosine_decay_schedule(
      learning_rate, max(1, total_steps - warmup)
    )
  else:
    after = optax.constant_schedule(learning_rate)
  if not warmup:
    return after
  first = learning_rate / warmup
  before = optax.linear_schedule(first, learning_rate, max(warmup - 1, 1))
  return optax.join_schedules([before, after], [warmup])


def make_optimizer(
  configs: Mapping[str, OptimConfig], schedules: Mapping[str, optax.Schedule]
) -> optax.GradientTransformation:
  """An optimiser over {name: parameters}, with nothing shared between names.

  The gradient norm of each is clipped alone: a task trains as it would without
  its neighbours.

  Args:
    configs: of every name in the tree.
    schedules: of every name in the tree.
  """
  return optax.partition(
    {name: _optimizer(configs[name], schedules[name]) for name in configs},
    # The label of everything below a name is that name.
    lambda params: {name: name for name in params},
  )


def _optimizer(
  config: OptimConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  if config.name == "sgd":
    update = optax.sgd(schedule, momentum=config.momentum)
  else:
    update = optax.adamw(schedule, weight_decay=config.weight_decay)
  if not config.grad_clip:
    return update
  return optax.chain(optax.clip_by_global_norm(config.grad_clip), update)

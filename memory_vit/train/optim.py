"""Learning rate schedules and optimizers of tasks."""

import decimal
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from memory_vit.config import OptimConfig
from memory_vit.model.parts import PARTS
from memory_vit.model.regimes import OWN_BACKBONE

_ALL_PARTS = (*PARTS, OWN_BACKBONE)
# Names of the arrays with weight decay: "kernel" in any part; "conv", "keys"
# and "values" in the side stream; "down" and "up" in the probe.
_KERNELS = ("kernel", "conv", "keys", "values", "down", "up")


def make_schedule(
  config: OptimConfig, learning_rate: float, total_steps: int
) -> optax.Schedule:
  """Return a schedule: linear warm-up from above 0, then cosine or constant."""
  warmup = warmup_steps(config, total_steps)
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


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
  if config.warmup_steps:
    return config.warmup_steps
  # Multiply as decimals: in binary, 0.575 * 100 is a little less than 57.5.
  return round(decimal.Decimal(str(config.warmup)) * total_steps)


def make_optimizer(
  configs: Mapping[str, OptimConfig], schedules: Mapping[str, optax.Schedule]
) -> optax.GradientTransformation:
  """Return an optimizer over {task: parameters} that keeps tasks independent.

  It clips the gradient of each task separately, so a task trains as if alone.
  """
  return optax.partition(
    {name: _optimizer(configs[name], schedules[name]) for name in configs},
    lambda params: {name: name for name in params},
  )


def where(condition: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def where_finite(finite: Mapping[str, jax.Array], new: Any, old: Any) -> Any:
  """Keep the old optimizer state of tasks whose update is not finite."""
  inner = {
    name: where(finite[name], state, old.inner_states[name])
    for name, state in new.inner_states.items()
  }
  return new._replace(inner_states=inner)


def _optimizer(
  config: OptimConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Return a task's optimizer; it scales updates of class token and memory."""
  stages = []
  if config.grad_clip:
    clip = optax.clip_by_global_norm(config.grad_clip)
    by_part = config.clip_by == "part"
    stages += [_by_part(dict.fromkeys(_ALL_PARTS, clip)) if by_part else clip]
  if config.name == "sgd":
    stages += [optax.sgd(schedule, momentum=config.momentum)]
  else:
    stages += [
      optax.adamw(schedule, weight_decay=config.weight_decay, mask=_kernels)
    ]
  factors = {"cls": config.cls_factor, "memory": config.memory_factor}
  if {*factors.values()} != {1.0}:
    by_name = {**dict.fromkeys(_ALL_PARTS, 1.0), **factors}
    stages += [_by_part({part: optax.scale(f) for part, f in by_name.items()})]
  return optax.chain(*stages)


def _kernels(params: Any) -> Any:
  """Return a mask of `params`, True for arrays with weight decay.

  As in the library big_vision, weight decay applies to matrices that multiply
  tokens, but not to biases, LayerNorms, tokens or position embeddings.
  """
  return jax.tree.map_with_path(
    lambda path, _: path[-1].key in _KERNELS, params
  )


def _by_part(
  transforms: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
  """Return a transformation that applies `transforms[part]` to each part."""
  return optax.partition(
    transforms,
    # The path of a leaf is (task, part, ...). All leaves are of one task, so
    # the part is enough as a label.
    lambda params: jax.tree.map_with_path(lambda path, _: path[1].key, params),
  )

"""Which values the options may have."""

import math
import operator
from typing import Any

from memory_vit.regimes import REGIMES
from memory_vit.tasks import MAX_IMAGE_SIZE, MAX_RESIZE

_TRAIN_CROPS = ("inception", "small")
_EVAL_CROPS = ("resize", "central")
_POSITIVE = ("image_size", "batch_size", "batch_size_eval", "total_steps",
             "eval_every", "checkpoint_every", "log_every",
             "pretrain.batch_size", "task.bottleneck", "mesh.fsdp",
             "optim.max_skipped")  # fmt: skip
_NOT_NEGATIVE = ("seed", "profile_at", "stall_timeout", "data.max_bad",
                 "pretrain.data.max_bad", "task.cells", "optim.momentum",
                 "optim.weight_decay", "optim.grad_clip",
                 "optim.cls_factor", "optim.memory_factor", "data.resize",
                 "data.cache_gib", "upstream.resize", "sweep.memory_gib",
                 "pretrain.data.resize", "pretrain.data.cache_gib",
                 "pretrain.total_steps")  # fmt: skip
# Also of what a task says of its own evaluation: see `tasks`.
_AT_MOST = {"image_size": MAX_IMAGE_SIZE, "data.resize": MAX_RESIZE,
            "upstream.resize": MAX_RESIZE,
            "pretrain.data.resize": MAX_RESIZE}  # fmt: skip


def problems(config: Any) -> list[str]:
  """What is wrong with the values of a `config.Config`, one line each."""
  choices = {
    "regime": (config.regime, tuple(REGIMES)),
    "dtype": (config.dtype, ("float32", "bfloat16")),
    "gelu": (config.gelu, ("tanh", "exact")),
    "optim.name": (config.optim.name, ("sgd", "adamw")),
    "optim.clip_by": (config.optim.clip_by, ("task", "part")),
    "optim.schedule": (config.optim.schedule, ("cosine", "constant")),
    "data.train_crop": (config.data.train_crop, _TRAIN_CROPS),
    "data.eval_crop": (config.data.eval_crop, _EVAL_CROPS),
    "task.cls_init": (config.task.cls_init, ("pretrained", "normal")),
    "sweep.export": (config.sweep.export, ("best", "all")),
    "study.search": (config.study.search, ("first", "all")),
    "upstream.eval_crop": (config.upstream.eval_crop, _EVAL_CROPS),
    "pretrain.data.train_crop": (config.pretrain.data.train_crop, _TRAIN_CROPS),
  }
  lines = [
    f"config.{key} is {value!r}, expected one of {list(allowed)}."
    for key, (value, allowed) in choices.items()
    if value not in allowed
  ]
  for keys, least in ((_POSITIVE, 1), (_NOT_NEGATIVE, 0)):
    for key in keys:
      value = operator.attrgetter(key)(config)
      if not (math.isfinite(value) and value >= least):
        lines.append(f"config.{key} is {value}, expected at least {least}.")
  for key, most in _AT_MOST.items():
    value = operator.attrgetter(key)(config)
    if value > most:
      lines.append(f"config.{key} is {value}, expected at most {most} pixels.")
  for key in ("learning_rate", "pretrain.learning_rate", "task.memory_std"):
    value = operator.attrgetter(key)(config)
    if not (math.isfinite(value) and value > 0):
      lines.append(f"config.{key} is {value}, expected a positive number.")
  if config.optim.accumulation_steps < 1 or (
    config.batch_size % config.optim.accumulation_steps
  ):
    lines.append(
      f"config.batch_size {config.batch_size} does not divide into "
      f"config.optim.accumulation_steps {config.optim.accumulation_steps}."
    )
  if not 0 <= config.optim.warmup <= 1:
    lines.append(
      f"config.optim.warmup is {config.optim.warmup}, expected a share of the "
      "steps, from 0 to 1."
    )
  if not 0 <= config.optim.label_smoothing < 1:
    lines.append(
      f"config.optim.label_smoothing is {config.optim.label_smoothing}, "
      "expected from 0 to less than 1."
    )
  if config.optim.name == "sgd" and config.optim.weight_decay:
    lines.append(
      f"config.optim.weight_decay is {config.optim.weight_decay}, which 'sgd' "
      "does not use: expected 0, or config.optim.name 'adamw'."
    )
  if config.data.seed < -1 or config.pretrain.data.seed < -1:
    lines.append("config.data.seed is below -1, which is the seed of the run.")
  if config.profile_at > config.total_steps:
    lines.append(
      f"config.profile_at is {config.profile_at}, beyond config.total_steps "
      f"{config.total_steps}."
    )
  if config.pretrain.variant and config.pretrain.total_steps < 1:
    lines.append(
      f"config.pretrain.total_steps is {config.pretrain.total_steps}, expected "
      "at least 1 to train a backbone."
    )
  return lines

"""What a pass needs to go on where it was left, and what must be as it was."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from memory_vit import records, train, trees
from memory_vit.checkpoints import Checkpoints
from memory_vit.errors import TrainingError
from memory_vit.step import TrainState

logger = logging.getLogger("memory_vit")


def save(
  checkpoints: Checkpoints,
  state: TrainState,
  past: train.Past,
  meta: Mapping[str, Any],
) -> None:
  """Writes all that a continued pass needs."""
  best = past.best
  checkpoints.save(
    int(state.step),
    {
      "state": state,
      "best": {name: b.params for name, b in best.items() if b.step},
    },
    {
      **meta,
      "best": {name: [b.step, b.accuracy] for name, b in best.items()},
      "lost": past.lost,
      "timed": [past.timed_steps, past.timed_seconds],
    },
  )


def resume(
  checkpoints: Checkpoints, state: TrainState, meta: Mapping[str, Any]
) -> tuple[TrainState, train.Past | None]:
  """The newest saved state with its past, or the given one without any."""
  step = checkpoints.latest()
  if step is None:
    return state, None
  found = checkpoints.meta(step)
  require_same(found, meta, checkpoints.directory)
  like = {
    "state": state,
    "best": {
      name: jax.device_get(state.params[name])
      for name, (best_step, _) in found["best"].items()
      if best_step
    },
  }
  saved = checkpoints.restore(step, like)
  best = {
    name: train.Best(best_step, accuracy, saved["best"].get(name))
    for name, (best_step, accuracy) in found["best"].items()
  }
  logger.info("going on from step %d in %s", step, checkpoints.directory)
  return saved["state"], train.Past(best, found["lost"], *found["timed"])


def require_same(
  found: Mapping[str, Any], now: Mapping[str, Any], directory: Path
) -> None:
  """Raises unless a pass goes on with what it began with."""
  advice = "Give that one, or another --workdir."
  if found["fingerprint"] != now["fingerprint"]:
    raise TrainingError(
      f"the run in {directory} began on the backbone with fingerprint "
      f"{found['fingerprint'][:16]}, not {now['fingerprint'][:16]}. {advice}"
    )
  for key in ("config", "parents", "attends_to", "variants", "data"):
    if key not in found:
      raise TrainingError(
        f"the run in {directory} was begun by another version of memory_vit: "
        f"its states say nothing of {key!r}. Give another --workdir."
      )
    changed = records.differences(found[key], now[key])
    if changed:
      raise TrainingError(
        f"the run in {directory} began with another {key}. {advice}\n  "
        + "\n  ".join(changed)
      )


# What may change between a run and its continuation without changing a result.
# Directories of earlier tasks may: their digests may not.
_MAY_CHANGE = ("backbone", "batch_size_eval", "data/cache_gib", "data/dir",
               "log_every", "profile_at", "sweep/export", "sweep/memory_gib",
               "task/attends_to", "task/indirect", "upstream/dir",
               "upstream/eval_crop", "upstream/name", "upstream/resize",
               "upstream/split")  # fmt: skip


def what_matters(values: Mapping[str, Any]) -> dict[str, Any]:
  """The options that a continued run must share, as JSON gives them back.

  Args:
    values: a configuration, or what `config.json` holds.

  Returns:
    {"config.task.cells": 5, ...}, without what a study alone reads.
  """
  flat = trees.flatten(json.loads(json.dumps(values)))
  return {f"config.{k.replace('/', '.')}": v for k, v in flat.items()
          if k not in _MAY_CHANGE and not k.startswith("study/")}  # fmt: skip

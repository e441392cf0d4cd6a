"""Save the state of a pack of trials, and resume from it.

A pack does not resume with the inputs of another run. Training options may
change, and the result records them; the structure of the saved state, the
classes and the order of the images never change.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from memory_vit.config import OPTIONS, to_dict
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split import Split
from memory_vit.errors import TrainingError
from memory_vit.kinds.scores import Evaluation, Scores
from memory_vit.model import trees
from memory_vit.runtime import schema, sharding
from memory_vit.train import settle
from memory_vit.train.checkpoints import Checkpoints
from memory_vit.train.divergence import SkipCount
from memory_vit.train.inputs import RunInputs
from memory_vit.train.step import TrainState
from memory_vit.train.sweep import Trial

logger = logging.getLogger(__name__)

FORMAT = 5  # version of the JSON values that are saved beside the arrays
# Stands for a missing score: it is worse than any score.
_WORST = -math.inf
_RECORDED = [
  f"config.{k}" for k, o in OPTIONS.items() if o.resume == "recorded"
]


@dataclasses.dataclass(frozen=True)
class BestParams:
  """The parameters of a trial at its best validation score.

  Without a validation split, these are the parameters of the last step, without
  scores. `params` is on the host, and None before the first evaluation.
  """

  step: int = 0
  params: Any = None
  scores: Scores = Scores()


@dataclasses.dataclass(frozen=True)
class LoopState:
  """State of the training loop, without `TrainState`; mappings are by trial."""

  best: Mapping[str, BestParams]
  # {trial: step at which it was lost after too many skipped updates in a row}.
  # A lost trial keeps its best parameters, which are those of an earlier step.
  lost: Mapping[str, int] = dataclasses.field(default_factory=dict)
  skipped: Mapping[str, SkipCount] = dataclasses.field(default_factory=dict)
  # Whether an evaluation is due at this step, but has not been made yet.
  pending: bool = False
  # Changed options and data, each {"step", "key", "from", "to"}.
  changes: tuple[Mapping[str, Any], ...] = ()
  timed_steps: int = 0
  timed_seconds: float = 0.0

  @property
  def best_steps(self) -> list[int]:
    """Step of the best parameters, for each trial that is not lost."""
    return [b.step for name, b in self.best.items() if name not in self.lost]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """Length of training, and steps between logs, evaluations and saved states.

  An interval of 0 means never. The last step is always evaluated and saved.
  Training stops early after `patience` evaluations without an improvement.
  """

  total: int
  log: int
  evaluate: int = 0
  checkpoint: int = 0
  profile_at: int = 0
  patience: int = 0

  def due(self, step: int, every: int) -> bool:
    return step == self.total or (every > 0 and step % every == 0)

  def stops_early(self, step: int, best_steps: Iterable[int]) -> bool:
    """Return whether no trial improved in the last `patience` evaluations."""
    if not (self.patience and step and self.due(step, self.evaluate)):
      return False
    longest = self.patience * self.evaluate
    return all(step - best >= longest for best in best_steps)


def keep_better(
  best: Mapping[str, BestParams],
  results: Mapping[str, Evaluation],
  state: TrainState,
) -> dict[str, BestParams]:
  """Update trials whose score improved; a score of None is no improvement."""
  return {
    name: _at_now(name, state, results[name])
    if name in results and _score(results[name].scores) > _score(old.scores)
    else old
    for name, old in best.items()
  }


def keep_last(
  best: Mapping[str, BestParams], state: TrainState
) -> dict[str, BestParams]:
  """Take the parameters of the last step for trials that have no score."""
  return {
    name: _at_now(name, state) if old.scores.score is None else old
    for name, old in best.items()
  }


def _score(scores: Scores) -> float:
  return _WORST if scores.score is None else scores.score


def _at_now(
  name: str, state: TrainState, result: Evaluation | None = None
) -> BestParams:
  return BestParams(
    int(state.step),
    sharding.to_host(state.params[name]),
    result.scores if result else Scores(),
  )


def describe(inputs: RunInputs, trials: Sequence[Trial]) -> dict[str, Any]:
  """Describe a pack; to resume, its description must match the saved one."""
  train, stated = inputs.splits["train"], inputs.kind
  parents: dict[str, Any] = {
    task.spec.name: task.digest for task in inputs.parents
  }
  if inputs.first_head:
    parents["config.task.init"] = settle.head_digest(inputs.first_head)
  data: dict[str, Any] = {"classes": list(train.class_names)}
  data |= {name: [*getattr(stated, name)] for name in stated.kind.needed}
  return {
    "fingerprint": inputs.backbone.fingerprint,
    "parents": parents,
    "attends_to": {task.spec.name: task.digest for task in inputs.attends_to},
    "trials": {trial.name: trial.label for trial in trials},
    "data": data,
    "files": inputs.record.compared,
    # With a cache, the batches depend on the number of processes.
    "drawn_by": jax.process_count() if inputs.cache else 1,
    "config": what_matters(to_dict(inputs.config)),
  }


def save(
  checkpoints: Checkpoints,
  state: TrainState,
  past: LoopState,
  meta: Mapping[str, Any],
  splits: Mapping[str, Split],
) -> None:
  """Write everything that a resumed pack needs; all processes must call.

  Raise `BrokenDataError` if all processes together skipped too many examples of
  `splits`.
  """
  best = past.best
  checkpoints.save(
    int(state.step),
    {
      "state": state,
      "best": {n: b.params for n, b in best.items() if b.params is not None},
    },
    {
      **meta,
      "format": FORMAT,
      "best": {
        name: [
          b.step,
          dataclasses.asdict(b.scores),
          b.params is not None,
        ]
        for name, b in best.items()
      },
      "lost": past.lost,
      "skipped": {
        name: dataclasses.asdict(count) for name, count in past.skipped.items()
      },
      "pending": past.pending,
      "changes": list(past.changes),
      "left_out": {
        key: split.sync_unreadable() for key, split in splits.items()
      },
      "timed": [past.timed_steps, past.timed_seconds],
    },
  )


def resume(
  checkpoints: Checkpoints,
  state: TrainState,
  meta: Mapping[str, Any],
  splits: Mapping[str, Split],
  steps: Steps,
  record: DataRecord,
  allow_changed_data: bool = False,
) -> tuple[TrainState, LoopState | None]:
  """Restore the newest saved state; if there is none, return `state` and None.

  `meta` must equal the saved description, except for options that may change.
  Examples that were skipped before stay skipped.
  """
  step = checkpoints.latest()
  if step is None:
    return state, None
  found = checkpoints.meta(step)
  if found.get("format") != FORMAT:
    raise TrainingError(
      f"the run in {checkpoints.directory} was begun by another version of "
      "memory_vit: resume it with that version, or give another --workdir."
    )
  options = found["config"]
  changed = _option_changes(step, options, meta["config"])
  accepted = {change["key"]: change["to"] for change in changed}
  began = {**found, "config": {**options, **accepted}}
  require_same(began, meta, checkpoints.directory)
  _require_steps_left(step, found, steps, changed, checkpoints.directory)
  new_data = record.differences(found["files"])
  changed += _data_changes(step, found, meta, new_data)
  if new_data and not allow_changed_data:
    raise TrainingError(_other_data(checkpoints.directory, new_data))
  for change in changed:
    logger.warning("from step %(step)d on, %(key)s is %(to)r, not %(from)r",
                   change)  # fmt: skip
  for key, bad in found["left_out"].items():
    # `bad` are indices of the old data: they would be wrong in changed data.
    if key not in new_data:
      reason = f"left out up to step {step}"
      splits[key].mark_unreadable(dict.fromkeys(bad, reason))
  like = {
    "state": state,
    "best": {
      name: sharding.to_host(state.params[name])
      for name, (*_, has_params) in found["best"].items()
      if has_params
    },
  }
  saved = checkpoints.restore(step, like)
  best = {
    name: BestParams(at, saved["best"].get(name), Scores(**scores))
    for name, (at, scores, _) in found["best"].items()
  }
  logger.info("resuming from step %d in %s", step, checkpoints.directory)
  skipped = {
    name: SkipCount(values["total"], tuple(values["row"]))
    for name, values in found["skipped"].items()
  }
  timed_steps, timed_seconds = found["timed"]
  return saved["state"], LoopState(
    best=best,
    lost=found["lost"],
    skipped=skipped,
    pending=found["pending"],
    changes=(*found["changes"], *changed),
    timed_steps=timed_steps,
    timed_seconds=timed_seconds,
  )


def _option_changes(
  step: int, began: Mapping[str, Any], now: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """List {"step", "key", "from", "to"} for permitted changes of options."""
  return [
    {"step": step, "key": key, "from": began[key], "to": now[key]}
    for key in _RECORDED
    if key in began and began[key] != now[key]
  ]


def _data_changes(
  step: int,
  saved: Mapping[str, Any],
  now: Mapping[str, Any],
  new_data: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
  """List {"step", "key", "from", "to", "what"} for each split of `new_data`.

  `new_data` is {split with changed data: lines that say what has changed}.
  """
  before = saved["files"]
  return [
    {
      "step": step,
      "key": f"data of {split}",
      "from": before.get(split, {}).get("sha256"),
      "to": now["files"].get(split, {}).get("sha256"),
      "what": list(lines),
    }
    for split, lines in new_data.items()
  ]


def _other_data(directory: Path, new_data: Mapping[str, Sequence[str]]) -> str:
  lines = []
  for split, (first, *more) in new_data.items():
    lines += [f"{split}: {first}", *more]
  return (
    f"the run in {directory} began with other data. Restore the earlier data, "
    "resume with the changed data by --allow_changed_data, or give another "
    "--workdir.\n  " + "\n  ".join(lines)
  )


def _require_steps_left(
  step: int,
  saved: Mapping[str, Any],
  steps: Steps,
  changed: Sequence[Mapping[str, Any]],
  directory: Path,
) -> None:
  """Refuse changed options if the run has no steps left that would use them."""
  if step > steps.total:
    raise TrainingError(
      f"the run in {directory} is at step {step}, beyond config.total_steps "
      f"{steps.total}: raise config.total_steps to at least this step."
    )
  best = [at for name, (at, *_) in saved["best"].items()
          if name not in saved["lost"]]  # fmt: skip
  if step == steps.total:
    ended, longer = f"has taken all of its {step} steps", "total_steps"
  elif not saved["pending"] and steps.stops_early(step, best):
    ended, longer = f"stopped early after {step} steps", "early_stopping"
  else:
    return
  keys = [c["key"] for c in changed if c["key"] != f"config.{longer}"]
  if keys:
    raise TrainingError(
      f"the run in {directory} {ended}, so changes of {', '.join(keys)} would "
      "have no effect. Give the earlier values, a greater "
      f"config.{longer}, or another --workdir."
    )


def require_same(
  found: Mapping[str, Any], now: Mapping[str, Any], directory: Path
) -> None:
  """Raise if backbone, tasks, data or options differ from the saved ones."""
  advice = "Give what the run began with, or another --workdir."
  if found["fingerprint"] != now["fingerprint"]:
    raise TrainingError(
      f"the run in {directory} began on the backbone with fingerprint "
      f"{found['fingerprint'][:16]}, but the backbone now has "
      f"{now['fingerprint'][:16]}. {advice}"
    )
  processes = [saved["drawn_by"] for saved in (found, now)]
  if processes[0] != processes[1]:
    raise TrainingError(
      f"the run in {directory} began with {processes[0]} processes, but now "
      f"there are {processes[1]}: with config.cache, each process draws "
      "batches from its own rows. Start the same number of processes, or give "
      "another --workdir."
    )
  for key in ("config", "parents", "attends_to", "trials", "data"):
    changed = schema.differences(found[key], now[key])
    if changed:
      raise TrainingError(
        f"the run in {directory} began with different {key}. {advice}\n  "
        + "\n  ".join(changed)
      )


def what_matters(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return options that resumed runs must keep, {"config.task.cells": 5, ...}.

  Values have the types of JSON. Epochs and directories of tasks are left out:
  the number of steps and the digests of tasks are compared instead.
  """
  free = {key for key, option in OPTIONS.items() if option.resume == "free"}
  flat = trees.flatten(json.loads(json.dumps(values)))
  flat = {name.replace("/", "."): value for name, value in flat.items()}
  return {f"config.{k}": v for k, v in flat.items() if k not in free}

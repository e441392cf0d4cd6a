"""Plan packs of trials by memory, and train one pack after the other."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.config import to_dict
from memory_vit.errors import DivergedError, TrainingError
from memory_vit.model import trees
from memory_vit.runtime import checksums, files, messages, processes
from memory_vit.train import sweep
from memory_vit.train.loop_state import BestParams
from memory_vit.train.pack import PackResult, train_pack
from memory_vit.train.step import TrainState
from memory_vit.train.sweep import PassPlan, Trial
from memory_vit.train.trainer import Trainer

logger = logging.getLogger(__name__)


def plan(trainer: Trainer, trials: Sequence[Trial], workdir: Path) -> PassPlan:
  """Plan which trials share a pass, by an estimate of their memory.

  The plan depends on the free memory, so it is saved with each state, and a
  resumed run keeps it. All processes use the plan of process 0.
  """
  values = processes.on_process_0(lambda: _saved_plan(workdir))
  if values is None:
    made = dataclasses.asdict(make_plan(trainer, trials))
    values = processes.broadcast_from_process_0(made)
  plan = PassPlan.from_json(values)
  planned = sorted(name for names in plan.passes for name in names)
  names = sorted(trial.name for trial in trials)
  if planned != names:
    raise TrainingError(
      f"the run in {workdir} began with the trials {messages.brief(planned)}, "
      f"the configuration has {messages.brief(names)}. Give the one that the "
      "run began with, or another --workdir."
    )
  return plan


def _saved_plan(workdir: Path) -> Any:
  """The plan in a saved state, as JSON; None if no state can be read.

  Damaged states are left to `Checkpoints`.
  """
  for path in _states(workdir):
    with contextlib.suppress(TrainingError):
      return checksums.read(path)["meta"].get("plan")
  return None


def _states(workdir: Path) -> list[Path]:
  found = (workdir / "checkpoints").rglob("*")
  return sorted(
    path for path in found if path.name.isdigit() and checksums.is_sealed(path)
  )


def has_saved(workdir: Path) -> bool:
  """Whether process 0 sees a saved state of a pack; all processes must call."""
  return processes.on_process_0(lambda: bool(_states(workdir)))


def make_plan(trainer: Trainer, trials: Sequence[Trial]) -> PassPlan:
  """Make a new plan; see `plan`."""
  plans = [
    _plan_group(trainer.for_group(group), group)
    for group in sweep.by_pass_group(trials)
  ]
  largest = max(plans, key=lambda plan: plan.bytes_of_one or 0)
  passes = tuple(names for plan in plans for names in plan.passes)
  return dataclasses.replace(largest, passes=passes)


def _plan_group(trainer: Trainer, trials: Sequence[Trial]) -> PassPlan:
  if len(trials) == 1 or not trainer.config.learned.shares_pass:
    return PassPlan(tuple((trial.name,) for trial in trials))
  # All are padded to the longest memory.
  longest = sorted(trials, key=sweep.size)[-2:]
  first = pack_bytes(trainer, longest[1:])
  free = sweep.free_bytes(trainer.config.sweep.memory_gib)
  # A further trial shares the pass and takes less than the first: if the first
  # fits once for each trial, no larger pack is compiled.
  further = None
  if first * len(trials) > free:
    further = max(0, pack_bytes(trainer, longest) - first)
  most = first if further is None else further
  packs = sweep.packs_of(trials, sweep.at_once(first, most, free))
  logger.info(
    "%d trials in %d passes: one takes %.2f GiB, each further one %s %.3f GiB, "
    "%.2f GiB may be taken (estimated by compiling)",
    len(trials), len(packs), first / 2**30,
    "less than" if further is None else "about", most / 2**30, free / 2**30,
  )  # fmt: skip
  names = tuple(tuple(trial.name for trial in pack) for pack in packs)
  return PassPlan(names, first, further)


def pack_bytes(trainer: Trainer, trials: Sequence[Trial]) -> int:
  """Estimate the memory of a pack on a device, beside the backbone."""
  tasks = {t.name: trainer.new_task(t) for t in trials}
  step = trainer.make_step(trials, tasks)
  state = jax.eval_shape(
    lambda params: TrainState(
      jnp.int32(0), params, step.optimizer.init(params)
    ),
    {name: task.params for name, task in tasks.items()},
  )
  config = trainer.config
  shape = (config.batch_size, config.image_size, config.image_size, 3)
  image = jax.ShapeDtypeStruct(shape, jnp.float32)
  label = trainer.train.label_dtype
  dtype = jax.dtypes.canonicalize_dtype(label.base)  # float64 becomes float32
  batch: dict[str, Any] = {
    "label": jax.ShapeDtypeStruct((config.batch_size, *label.shape), dtype)
  }
  if trainer.cache:
    batch["inputs"] = jax.eval_shape(trainer.frozen_pass(step), image)
  else:
    batch["image"] = image
  needed = step.peak_bytes(
    state.params, trainer.frozen(), batch, config.batch_size_eval
  )
  if trainer.cache:
    prepare = trainer.frozen_pass(step)
    needed += trainer.cache.bytes_on_device(
      [
        trainer.cache.needs(key, split, prepare)
        for key, split in trainer.cached_splits.items()
      ]
    )
  # State and gradient; twice the state, as the update does not work in place.
  return needed + 2 * trees.bytes_of(state) + trees.bytes_of(state.params)


def train(
  trainer: Trainer, trials: Sequence[Trial], plan: PassPlan, workdir: Path
) -> list[PackResult]:
  """Train one pack after the other; of a sweep, also after one diverged.

  `config.json` stays the configuration of the first start until an allowed
  change of it is accepted.
  """
  file, options = workdir / "config.json", to_dict(trainer.config)
  if not (has_saved(workdir) and processes.on_process_0(file.exists)):
    files.write_json(file, options)
  by_name = {trial.name: trial for trial in trials}
  packs = [[by_name[name] for name in names] for names in plan.passes]
  directory = workdir / "checkpoints"
  results: list[PackResult] = []
  if len(packs) == 1:
    (pack,) = packs
    trainer = trainer.for_group(pack)
    logdirs = logdirs_of(pack, workdir)
    results = [train_pack(trainer, pack, directory, logdirs, plan)]
  else:
    results = _train_packs(trainer, packs, plan, workdir)
  if any(result.changes for result in results):
    files.write_json(file, options)
  return results


def _train_packs(
  trainer: Trainer,
  packs: Sequence[Sequence[Trial]],
  plan: PassPlan,
  workdir: Path,
) -> list[PackResult]:
  """Train several packs; raise `DivergedError` if all diverge."""
  # A copy: the cache of a kind is freed when the next kind begins.
  trainer = dataclasses.replace(trainer)
  results, diverged = [], []
  for i, pack in enumerate(packs):
    trainer = trainer.for_group(pack)  # the same one within a group
    directory = workdir / "checkpoints" / f"pass-{i:02}"
    try:
      results.append(_train_pack(trainer, pack, plan, directory, workdir))
    except DivergedError as error:
      logger.warning("%s", error)
      diverged.append(error)
      none = {trial.name: BestParams() for trial in pack}
      results.append(PackResult(tasks={}, best=none, lost=error.lost))
  if len(diverged) == len(packs):
    raise diverged[-1]
  return results


def _train_pack(
  trainer: Trainer,
  pack: Sequence[Trial],
  plan: PassPlan,
  directory: Path,
  workdir: Path,
) -> PackResult:
  """Train a pack, unless an earlier process recorded that it diverged."""
  file = directory.with_suffix(".json")
  meta = json.loads(json.dumps(trainer.meta(pack)))
  found = processes.on_process_0(
    lambda: (
      files.read_object(file, "meta", "message", "lost")
      if file.exists()
      else None
    )
  )
  if found and found["meta"] == meta:
    raise DivergedError(found["message"], found["lost"])
  try:
    logdirs = logdirs_of(pack, workdir)
    return train_pack(trainer, pack, directory, logdirs, plan)
  except DivergedError as error:
    found = {"message": str(error), "lost": error.lost, "meta": meta}
    directory.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, found)
    raise


def logdirs_of(trials: Sequence[Trial], workdir: Path) -> dict[str, Path]:
  """A directory for each trial, which TensorBoard shows as a run."""
  return {
    t.name: workdir / "sweep" / t.label if t.label else workdir for t in trials
  }

"""Packs of trials that are trained together, one pack after the other."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.errors import DivergedError, TrainingError
from memory_vit.model import trees
from memory_vit.runtime import checksums, files, processes
from memory_vit.train import optim, sweep
from memory_vit.train.loop_state import BestParams
from memory_vit.train.step import TrainState
from memory_vit.train.sweep import Trial
from memory_vit.train.trainer import PackResult, Trainer

logger = logging.getLogger(__name__)


def plan(
  trainer: Trainer, trials: Sequence[Trial], workdir: Path
) -> dict[str, Any]:
  """Plan which trials share a pack, by an estimate of the memory they take.

  A run that goes on keeps its plan, whatever memory is free now; one that has
  saved nothing yet makes a new one. Where passes.json is lost, a new one has to
  agree with what is saved. All processes have that of process 0.

  Returns:
    {"passes": names of the trials of each pack, "bytes_of_one": what a pack of
    one trial takes, "bytes_per_variant": what each further one takes}; both
    None where there is one only, and the latter where all surely fit.

  Raises:
    TrainingError: where the plan is of other trials, or is lost and would be
      another one now.
  """
  if len(trials) == 1:
    return make_plan(trainer, trials)
  file = workdir / "passes.json"
  names = sorted(trial.name for trial in trials)
  saved = has_saved(workdir)
  if not (saved and processes.on_process_0(file.exists)):
    made = processes.broadcast_from_process_0(make_plan(trainer, trials))
    if not saved or processes.on_process_0(
      lambda: _agrees_with_saved(made["passes"], file)
    ):
      files.write_json(file, made)
    return made
  made = processes.on_process_0(lambda: files.read_object(file, "passes"))
  planned = sorted(name for pack in made["passes"] for name in pack)
  if planned != names:
    raise TrainingError(
      f"{file} plans the trials {planned}, the configuration has {names}. "
      "Give the one that the run began with, or another --workdir."
    )
  return made


def _agrees_with_saved(passes: Sequence[Sequence[str]], file: Path) -> bool:
  """Whether passes are those of the saved states, as far as they are saved.

  Where they are of other trials, as of a run that had one, it is False, and the
  run is going to be refused.

  Args:
    passes: names of the trials of each pack.
    file: that had the plan, in the working directory of the run.

  Raises:
    TrainingError: where the same trials are in other passes.
  """
  directory = file.parent / "checkpoints"
  known = {name for names in passes for name in names}
  states = (*directory.glob("pass-*/*"), *directory.glob("*"))
  for path in sorted(path for path in states if path.name.isdigit()):
    saved = set(checksums.read(path)["meta"]["variants"])
    is_alone = path.parent == directory
    if not saved <= known or (is_alone and saved != known):
      return False
    if is_alone:
      agrees = len(passes) == 1
    else:
      i = int(path.parent.name.removeprefix("pass-"))
      agrees = 1 < len(passes) > i and saved == set(passes[i])
    if not agrees:
      raise TrainingError(
        f"{file} is missing, and in the memory that is free now the trials "
        f"would be dealt out to passes in another way: {path} has "
        f"{sorted(saved)}, a new plan {[list(names) for names in passes]}. Put "
        "the file back, free memory or set config.sweep.memory_gib as it was, "
        "or give another --workdir."
      )
  return True


def has_saved(workdir: Path) -> bool:
  """Whether a pack of the run has saved a state with which it goes on.

  Every process must call: what the first one sees counts.
  """

  def look() -> bool:
    saved = (workdir / "checkpoints").rglob("*")
    return any(path.name.isdigit() for path in saved)

  return processes.on_process_0(look)


def make_plan(trainer: Trainer, trials: Sequence[Trial]) -> dict[str, Any]:
  """Deal trials out to packs: see `plan`, which keeps one that was made."""
  plans = [
    _plan_kind(trainer.of_kind(group), group)
    for group in sweep.of_one_kind(trials)
  ]
  largest = max(plans, key=lambda plan: plan["bytes_of_one"] or 0)
  passes = [names for plan in plans for names in plan["passes"]]
  return {**largest, "passes": passes}


def _plan_kind(trainer: Trainer, trials: Sequence[Trial]) -> dict[str, Any]:
  """Deal trials of one kind out to packs."""
  if len(trials) == 1 or not trainer.config.learned.shares_pass:
    return {
      "passes": [[trial.name] for trial in trials],
      "bytes_of_one": None,
      "bytes_per_variant": None,
    }
  # The longest memory is what all are padded to.
  longest = sorted(trials, key=sweep.size)[-2:]
  first = pack_bytes(trainer, longest[1:])
  free = sweep.free_bytes(trainer.config.sweep.memory_gib)
  # They share a pass, so a further one takes less than the first: where the
  # first fits so many times, no other need be compiled.
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
  return {
    "passes": [[trial.name for trial in pack] for pack in packs],
    "bytes_of_one": first,
    "bytes_per_variant": further,
  }


def pack_bytes(trainer: Trainer, trials: Sequence[Trial]) -> int:
  """Estimate the memory of a pack on a device, beside the backbone."""
  tasks = {t.name: trainer.new_task(t) for t in trials}
  optimizer = optim.make_optimizer(
    {t.name: t.config.optim for t in trials},
    {t.name: lambda step: 0.0 for t in trials},
  )
  state = jax.eval_shape(
    lambda params: TrainState(jnp.int32(0), params, optimizer.init(params)),
    {name: task.params for name, task in tasks.items()},
  )
  config = trainer.config
  shape = (config.batch_size, config.image_size, config.image_size, 3)
  step = trainer.make_step(trials, tasks)
  image = jax.ShapeDtypeStruct(shape, jnp.float32)
  batch: dict[str, Any] = {
    "label": jax.ShapeDtypeStruct((config.batch_size,), jnp.int32)
  }
  if trainer.kept:
    batch["inputs"] = jax.eval_shape(trainer.frozen_pass(step), image)
  else:
    batch["image"] = image
  needed = step.peak_bytes(
    state.params, trainer.frozen(), batch, config.batch_size_eval
  )
  if trainer.kept:
    prepare = trainer.frozen_pass(step)
    needed += trainer.kept.bytes_on_device(
      [
        trainer.kept.needs(key, reader, prepare)
        for key, reader in trainer.kept_splits.items()
      ]
    )
  # State and gradient; and once more, as the update does not work in place.
  return needed + 2 * trees.bytes_of(state) + trees.bytes_of(state.params)


def train(
  trainer: Trainer,
  trials: Sequence[Trial],
  plan: dict[str, Any],
  workdir: Path,
) -> list[PackResult]:
  """Train one pack after the other; of a sweep, also after one diverged."""
  by_name = {trial.name: trial for trial in trials}
  packs = [[by_name[name] for name in names] for names in plan["passes"]]
  directory = workdir / "checkpoints"
  if len(packs) == 1:
    (pack,) = packs
    trainer = trainer.of_kind(pack)
    return [trainer.train_pack(pack, directory, logdirs_of(pack, workdir))]
  # With trials of one kind goes what was kept for them.
  trainer = dataclasses.replace(trainer)
  results, diverged = [], []
  for i, pack in enumerate(packs):
    trainer = trainer.of_kind(pack)  # the same one within a kind
    try:
      results.append(_train_pack(trainer, pack, directory / f"pass-{i:02}",
                                 workdir))  # fmt: skip
    except DivergedError as error:
      logger.warning("%s", error)
      diverged.append(error)
      none = {trial.name: BestParams() for trial in pack}
      results.append(PackResult(tasks={}, best=none, lost=error.lost))
  if len(diverged) == len(packs):
    raise diverged[-1]
  return results


def _train_pack(
  trainer: Trainer, pack: Sequence[Trial], directory: Path, workdir: Path
) -> PackResult:
  """Train a pack, or remember from an earlier process that it diverged."""
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
    return trainer.train_pack(pack, directory, logdirs_of(pack, workdir))
  except DivergedError as error:
    found = {"message": str(error), "lost": error.lost, "meta": meta}
    directory.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, found)
    raise


def logdirs_of(trials: Sequence[Trial], workdir: Path) -> dict[str, Path]:
  """Give every trial a directory: TensorBoard shows it as a run of its own."""
  return {
    t.name: workdir / "sweep" / t.label if t.label else workdir for t in trials
  }

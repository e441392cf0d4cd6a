"""The passes of a run: which variants share one, and one after the other."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.errors import DivergedError, TrainingError
from memory_vit.model import trees
from memory_vit.model.regimes import REGIMES
from memory_vit.runtime import files, processes
from memory_vit.training import optim, sweep
from memory_vit.training.loop_state import BestParams
from memory_vit.training.step import TrainState
from memory_vit.training.sweep import Variant
from memory_vit.training.trainer import Learned, Learner

logger = logging.getLogger("memory_vit")


def plan(
  learner: Learner, variants: Sequence[Variant], workdir: Path
) -> dict[str, Any]:
  """Which variants are trained at once, and the estimate that says so.

  A run that goes on keeps its plan, whatever memory is free now; one that has
  saved nothing yet makes a new one. All processes have that of process 0.

  Returns:
    {"passes": names of the variants of each, "bytes_of_one": what a pass with
    one variant takes, "bytes_per_variant": what each further one takes}; both
    None where there is one only.
  """
  if len(variants) == 1:
    return _passes(learner, variants)
  file = workdir / "passes.json"
  names = sorted(variant.name for variant in variants)
  if not (processes.by_first(file.exists) and has_saved(workdir)):
    made = processes.from_first(_passes(learner, variants))
    files.write_json(file, made)
    return made
  made = processes.by_first(lambda: files.read_object(file, "passes"))
  planned = sorted(name for part in made["passes"] for name in part)
  if planned != names:
    raise TrainingError(
      f"{file} plans the variants {planned}, the configuration has {names}. "
      "Give the one that the run began with, or another --workdir."
    )
  return made


def has_saved(workdir: Path) -> bool:
  """Whether a pass of the run has saved a state with which it goes on.

  Every process must call: what the first one sees counts.
  """

  def look() -> bool:
    saved = (workdir / "checkpoints").rglob("*")
    return any(path.name.isdigit() for path in saved)

  return processes.by_first(look)


def _passes(learner: Learner, variants: Sequence[Variant]) -> dict[str, Any]:
  """Deals variants out to passes, on an estimate of the memory they take."""
  if len(variants) == 1 or not REGIMES[learner.config.regime].shares_pass:
    return {
      "passes": [[variant.name] for variant in variants],
      "bytes_of_one": None,
      "bytes_per_variant": None,
    }
  # The longest memory is what all are padded to.
  longest = sorted(variants, key=lambda v: v.config.task.cells)[-2:]
  first = pass_bytes(learner, longest[1:])
  further = max(0, pass_bytes(learner, longest) - first)
  free = sweep.free_bytes(learner.config.sweep.memory_gib)
  passes = sweep.passes_of(variants, sweep.at_once(first, further, free))
  logger.info(
    "%d variants in %d passes: one takes %.2f GiB, each further one %.3f GiB, "
    "%.2f GiB may be taken (estimated by compiling for one and for two)",
    len(variants), len(passes), first / 2**30, further / 2**30, free / 2**30,
  )  # fmt: skip
  return {
    "passes": [[variant.name for variant in part] for part in passes],
    "bytes_of_one": first,
    "bytes_per_variant": further,
  }


def pass_bytes(learner: Learner, variants: Sequence[Variant]) -> int:
  """Memory that a pass takes on a device beside the backbone, as compiled."""
  tasks = {v.name: learner.new_task(v) for v in variants}
  optimizer = optim.make_optimizer(
    {v.name: v.config.optim for v in variants},
    {v.name: lambda step: 0.0 for v in variants},
  )
  state = jax.eval_shape(
    lambda params: TrainState(jnp.int32(0), params, optimizer.init(params)),
    {name: task.params for name, task in tasks.items()},
  )
  config = learner.config
  shape = (config.batch_size, config.image_size, config.image_size, 3)
  batch = {
    "image": jax.ShapeDtypeStruct(shape, jnp.float32),
    "label": jax.ShapeDtypeStruct((config.batch_size,), jnp.int32),
  }
  step = learner.make_step(variants, tasks, optimizer)
  needed = step.peak_bytes(
    state.params, learner.frozen(), batch, config.batch_size_eval
  )
  # State and gradient; and once more, as the update does not work in place.
  return needed + 2 * trees.bytes_of(state) + trees.bytes_of(state.params)


def learn(
  learner: Learner,
  variants: Sequence[Variant],
  plan: dict[str, Any],
  workdir: Path,
) -> list[Learned]:
  """Trains one pass after the other; of a sweep, also after one diverged."""
  by_name = {variant.name: variant for variant in variants}
  passes = [[by_name[name] for name in names] for names in plan["passes"]]
  directory = workdir / "checkpoints"
  if len(passes) == 1:
    (part,) = passes
    return [learner.learn(part, directory, _logdirs(part, workdir))]
  learned, diverged = [], []
  for i, part in enumerate(passes):
    try:
      learned.append(_learn_pass(learner, part, directory / f"pass-{i:02}",
                                 workdir))  # fmt: skip
    except DivergedError as error:
      logger.warning("%s", error)
      diverged.append(error)
      none = {variant.name: BestParams() for variant in part}
      learned.append(Learned({}, none, error.lost, {}, (), 0, 0.0))
  if len(diverged) == len(passes):
    raise diverged[-1]
  return learned


def _learn_pass(
  learner: Learner, part: Sequence[Variant], directory: Path, workdir: Path
) -> Learned:
  """Trains a pass, or remembers from an earlier process that it diverged."""
  file = directory.with_suffix(".json")
  meta = json.loads(json.dumps(learner.meta(part)))
  found = processes.by_first(
    lambda: (
      files.read_object(file, "meta", "message", "lost")
      if file.exists()
      else None
    )
  )
  if found and found["meta"] == meta:
    raise DivergedError(found["message"], found["lost"])
  try:
    return learner.learn(part, directory, _logdirs(part, workdir))
  except DivergedError as error:
    found = {"message": str(error), "lost": error.lost, "meta": meta}
    directory.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, found)
    raise


def _logdirs(variants: Sequence[Variant], workdir: Path) -> dict[str, Path]:
  """TensorBoard shows every variant as a run of its own."""
  return {
    v.name: workdir / "sweep" / v.label if v.label else workdir
    for v in variants
  }

"""Plan the passes of a sweep by their memory, and train its packs in turn."""

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memory_vit.errors import DivergedError, TrainingError
from memory_vit.runtime import (
  checksums,
  files,
  live_memory,
  messages,
  processes,
  sharding,
)
from memory_vit.train import batches, pack, sweep
from memory_vit.train.fit import NO_WRITERS, PackResult, fit_pack
from memory_vit.train.inputs import RunInputs, of_group
from memory_vit.train.metric_writers import MetricWriters
from memory_vit.train.state import BestParams, describe
from memory_vit.train.step import StepMemory, Temporary
from memory_vit.train.sweep import PassPlan, Trial

logger = logging.getLogger(__name__)


def plan(inputs: RunInputs, workdir: Path) -> PassPlan:
  """Plan which trials share a pass, by an estimate of their memory.

  The plan depends on the free memory, so it is saved with each state, and a
  resumed run uses the saved plan. All processes use the plan of process 0.
  """
  values = processes.on_process_0(lambda: _saved_plan(workdir))
  if values is None:
    new_values = dataclasses.asdict(make_plan(inputs))
    values = processes.broadcast_from_process_0(new_values)
  plan = PassPlan.from_json(values)
  planned = sorted(name for names in plan.passes for name in names)
  names = sorted(trial.name for trial in inputs.trials)
  if planned != names:
    raise TrainingError(
      f"the run in {workdir} began with the trials {messages.brief(planned)}, "
      f"but the configuration has the trials {messages.brief(names)}. Give the "
      "configuration that the run began with, or another --workdir."
    )
  return plan


def _saved_plan(workdir: Path) -> Any:
  """Return the saved `PassPlan` as JSON values; None if no state has one.

  Only runs of several packs save a plan. This function skips damaged states,
  which `Checkpoints` reports later.
  """
  for path in _states(workdir):
    with contextlib.suppress(TrainingError):
      return checksums.read(path)["meta"].get("plan")
  return None


def _states(workdir: Path) -> list[Path]:
  paths = (workdir / "checkpoints").rglob("*")
  return sorted(
    path for path in paths if path.name.isdigit() and checksums.is_sealed(path)
  )


def has_saved(workdir: Path) -> bool:
  """Return whether process 0 finds a saved state; all processes must call."""
  return processes.on_process_0(lambda: bool(_states(workdir)))


def make_plan(inputs: RunInputs) -> PassPlan:
  """Make a new plan, without looking for a saved one; see `plan`."""
  plans = [
    plan_group(of_group(inputs, group), live_memory.compiled_bytes)
    for group in sweep.by_pass_group(inputs.trials)
  ]
  largest = max(plans, key=lambda plan: plan.bytes_of_one or 0)
  passes = tuple(names for plan in plans for names in plan.passes)
  return dataclasses.replace(largest, passes=passes)


def plan_group(inputs: RunInputs, compiled: Temporary) -> PassPlan:
  """Plan the passes of one group; compile a pack only if not all trials fit."""
  trials = inputs.trials
  config = inputs.config
  together = config.learned.shares_pass and not config.optim.in_closed_form
  if len(trials) == 1 or not together:
    return PassPlan(tuple((trial.name,) for trial in trials))
  free = sweep.free_bytes(config.sweep.memory_gib)
  # First try one pass of all trials. To estimate its memory, `pack_bytes`
  # traces the program of the pass. If the pass fits, training reuses the
  # traced program.
  taken = pack_bytes(inputs, trials)
  if taken <= free:
    logger.info(
      "%d trials in one pass, which takes %.2f of %.2f GiB (estimated from "
      "shapes)", len(trials), taken / 2**30, free / 2**30,
    )  # fmt: skip
    return PassPlan((tuple(trial.name for trial in trials),))
  # A pack pads all its trials to the size of its largest trial. So each trial
  # after the first adds the same memory, `further`. To estimate `further`,
  # compare a pass of the two largest trials with a pass of the largest alone.
  longest = sorted(trials, key=sweep.size)[-2:]
  first = pack_bytes(inputs, longest[1:])
  further = max(0, pack_bytes(inputs, longest) - first)
  share = _measured_share(inputs, first, further, free, compiled)
  first, further = int(share * first), int(share * further)
  packs = sweep.packs_of(trials, sweep.at_once(first, further, free))
  logger.info(
    "%d trials in %d passes: one trial takes %.2f GiB, each further one about "
    "%.3f GiB, and %.2f GiB are available (estimated by compiling)",
    len(trials), len(packs), first / 2**30, further / 2**30, free / 2**30,
  )  # fmt: skip
  names = tuple(tuple(trial.name for trial in pack) for pack in packs)
  return PassPlan(names, first, further)


def _measured_share(
  inputs: RunInputs, first: int, further: int, free: int, compiled: Temporary
) -> float:
  """Compile a pack; return its measured memory divided by its estimated memory.

  The size of the pack is chosen as if trials took half of their estimated
  memory. The caller chooses the size of all packs by the returned value. If the
  caller chooses the same size, training reuses the program compiled here.
  """
  most = sweep.at_once(min(first // 2, free), further // 2, free)
  largest = sweep.packs_of(inputs.trials, most)[-1]
  taken = pack_bytes(inputs, largest, compiled)
  return taken / (first + (len(largest) - 1) * further)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackMemory(StepMemory):
  """Memory of a pack on a device, in bytes, not counting the backbone.

  Attributes:
    state: trained parameters, optimizer state and gradient.
    cached: rows of the cache that lie on the device.
  """

  state: int
  cached: int

  @property
  def total(self) -> int:
    return super().total + self.state + self.cached


def pack_bytes(
  inputs: RunInputs,
  trials: Sequence[Trial],
  temporary: Temporary = live_memory.temporary_bytes,
) -> int:
  return pack_memory(inputs, trials, temporary).total


def pack_memory(
  inputs: RunInputs, trials: Sequence[Trial], temporary: Temporary
) -> PackMemory:
  """Estimate the device memory of a pack; see `Step.memory`."""
  step, state = pack.shapes(inputs, trials)
  needed = step.memory(
    state.params,
    inputs.frozen,
    batches.batch_shapes(inputs),
    inputs.config.batch_size_eval,
    temporary=temporary,
  )
  cached = 0
  if inputs.cache:
    cached = inputs.cache.bytes_on_device(batches.cache_needs(inputs))
  return PackMemory(
    **vars(needed),
    # Count the state twice: although the old state is donated, it is needed
    # until the new state is known to be finite. `state.params` stands for the
    # gradient, which has the same size.
    state=sharding.bytes_on_a_device((state, state, state.params)),
    cached=cached,
  )


def fit_passes(
  inputs: RunInputs,
  plan: PassPlan,
  workdir: Path,
  *,
  writers: MetricWriters = NO_WRITERS,
  **options: Any,
) -> list[PackResult]:
  """Train all packs of a plan; a pack that diverges does not stop the others.

  `options` are passed to `fit_pack`. Raise `DivergedError` only if all diverge.
  """
  results, diverged = [], []
  for group, packs in packs_by_group(inputs, plan):
    for i, trials in packs:
      directory = workdir / "checkpoints" / f"pass-{i:02}"
      options["profile_dir"] = sweep.logdir_of(trials[0], workdir)
      try:
        fitted = _fit_pass(
          group, trials, directory, plan=plan, writers=writers, **options
        )
        results.append(fitted)
      except DivergedError as error:
        logger.warning("%s", error)
        writers.flush()
        # Drop the traceback, which would keep the group's cache in memory.
        diverged.append(error.with_traceback(None))
        empty = {trial.name: BestParams() for trial in trials}
        results.append(PackResult(tasks={}, best=empty, lost=error.lost))
  if len(diverged) == len(plan.passes):
    raise diverged[-1]
  return results


def packs_by_group(
  inputs: RunInputs, plan: PassPlan
) -> Iterator[tuple[RunInputs, list[tuple[int, list[Trial]]]]]:
  """Yield, for each group, its inputs and its packs as (number, trials)."""
  by_name = {trial.name: trial for trial in inputs.trials}
  packs = [[by_name[name] for name in names] for names in plan.passes]
  for _, numbered in itertools.groupby(
    enumerate(packs), lambda pair: sweep.pass_group(pair[1][0].config)
  ):
    group = list(numbered)
    trials = [trial for _, pack in group for trial in pack]
    yield of_group(inputs, trials), group


def _fit_pass(
  inputs: RunInputs, trials: Sequence[Trial], directory: Path, **options: Any
) -> PackResult:
  """Train a pack and return its result.

  If the pack diverges, record this in a file, and raise `DivergedError`. Later
  calls with equal inputs and trials raise this error without training.
  """
  file = directory.with_suffix(".json")
  meta = json.loads(json.dumps(describe(inputs, trials)))
  recorded = processes.on_process_0(
    lambda: (
      files.read_object(file, "meta", "message", "lost")
      if file.exists()
      else None
    )
  )
  if recorded and recorded["meta"] == meta:
    raise DivergedError(recorded["message"], recorded["lost"])
  try:
    return fit_pack(inputs, trials, directory, **options)
  except DivergedError as error:
    recorded = {"message": str(error), "lost": error.lost, "meta": meta}
    directory.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, recorded)
    raise

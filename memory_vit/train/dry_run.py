"""Dry run: estimate steps, cached bytes and time of a run."""

import itertools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.cache.run_cache import Needs, RunCache
from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.data.split_ref import configured_splits
from memory_vit.runtime import sharding
from memory_vit.runtime.messages import counted
from memory_vit.runtime.preemption import StopSignal
from memory_vit.runtime.progress_bar import duration
from memory_vit.runtime.tables import aligned
from memory_vit.train import batches, pack, passes, settle, sweep
from memory_vit.train.inputs import RunInputs, of_group, open_inputs
from memory_vit.train.pack import Start

# Number of batches to read. The first batch is not timed, because reading it
# also starts the pipeline.
_READ = 3


def dry_run(config: Config, workdir: Path) -> str:
  """Describe a run from a few batches and steps; nothing is written.

  Raise if the run itself would be refused.
  """
  settle.require_same_start(config)
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  settle.require_sound(config, workdir, mesh)
  for ref in configured_splits(config).values():
    datasets.require_prepared(ref)
  inputs = open_inputs(config, workdir, mesh, StopSignal())
  rows: list[tuple[str, str]] = []
  for group in sweep.by_pass_group(inputs.trials):
    rows += _of_group(of_group(inputs, group))
  return (
    f"{aligned(rows)}\n\nMeasured on a few batches, without compilation, "
    "evaluation, and waiting for images if reading is slower than training."
  )


def _of_group(inputs: RunInputs) -> list[tuple[str, str]]:
  """Return (title, text) rows about a group of trials (`sweep.pass_group`)."""
  config, trials = inputs.config, inputs.trials
  packs = passes.make_plan(inputs).passes
  first = [t for t in trials if t.name in packs[0]]
  if config.optim.in_closed_form:
    steps = f"1, for {counted(len(trials), 'head')} in closed form"
    training = "solved at once, from the cached features"
  else:
    seconds = _step_seconds(inputs, pack.start(inputs, first))
    total = duration(config.total_steps * len(packs) * seconds)
    steps = (
      f"{config.total_steps:,} of {config.batch_size} images, for "
      f"{counted(len(trials), 'trial')} in {counted(len(packs), 'pass')}"
    )
    training = f"about {total}, {seconds:.3g} s a step"
  regimes = dict.fromkeys(trial.config.regime for trial in trials)
  return [
    *([("regime", ", ".join(regimes))] if config.sweep.regime else []),
    ("steps", steps),
    *_of_cache(inputs),
    ("training", training),
  ]


def _of_cache(inputs: RunInputs) -> list[tuple[str, str]]:
  """Return (title, text) rows about the cache: size, place and filling time."""
  cache, train = inputs.cache, inputs.splits["train"]
  if inputs.config.cache.what == "images":
    return [("cache", f"{train.size:,} decoded images, in memory")]
  if not cache:
    return [("cache", "off (config.cache.what is 'none')")]
  needs = batches.cache_needs(inputs)
  cache.require_free_space(needs)
  seconds = sum(n.missing * _row_seconds(cache, n) for n in needs)
  return [
    *(
      (
        f"{cache.config.cache.what} of {n.plan.role}",
        f"{n.plan.count:,} rows of {n.row_bytes:,} bytes: {n.bytes:,} bytes "
        f"({n.bytes / 2**30:.2f} GiB), {n.missing:,} rows are missing",
      )
      for n in needs
    ),
    ("cached in", cache.place),
    (
      "reading" if train.embedded else "computing",
      f"about {duration(seconds)}, once",
    ),
  ]


def _row_seconds(cache: RunCache, needs: Needs) -> float:
  """Measure the seconds to read one image and compute its cached row."""
  if not needs.missing:
    return 0.0
  examples, starts = needs.plan.examples, needs.plan.starts
  read = examples.batches(starts[:_READ], starts.step)
  last = next(read)
  began, count = time.perf_counter(), 0
  for batch in itertools.islice(read, _READ - 1):
    last, count = batch, count + 1
  reading = (time.perf_counter() - began) / max(1, count)
  if "image" not in last:  # embeddings need no computation
    return reading / starts.step
  placed = sharding.shard_batch(last["image"], cache.mesh)
  return (reading + _seconds(lambda: cache.prepare(placed))) / starts.step


def _step_seconds(inputs: RunInputs, start: Start) -> float:
  """Measure the seconds of a training step."""
  # A batch of zeros suffices: the time does not depend on the pixels.
  batch = jax.jit(
    lambda: jax.tree.map(
      lambda a: jnp.zeros(a.shape, a.dtype), dict(batches.batch_shapes(inputs))
    ),
    out_shardings=sharding.by_rows(inputs.mesh),
  )()
  state = start.state

  def step() -> Any:
    nonlocal state
    state, metrics = start.step(state, inputs.frozen, batch)
    return metrics

  return _seconds(step)


def _seconds(program: Any) -> float:
  """Time the second call of `program`, in seconds; the first call compiles."""
  jax.block_until_ready(program())
  began = time.perf_counter()
  jax.block_until_ready(program())
  return time.perf_counter() - began

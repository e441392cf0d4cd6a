"""Dry run of a benchmark: what would run, and an estimate of its time.

A step of every regime is timed on random images, with as many trials as the
search has, and so is a pass of the plain backbone. Nothing is written.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from memory_vit.benchmark import protocol, timing
from memory_vit.benchmark.layout import TaskData
from memory_vit.benchmark.protocol import Benchmark
from memory_vit.benchmark.record import run_directory
from memory_vit.benchmark.runner import require_data
from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.data.split_ref import configured_splits
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import REGIMES
from memory_vit.runtime import sharding
from memory_vit.runtime.tables import table
from memory_vit.study import finished_runs
from memory_vit.training import open_backbone, progress, resolve

# Passes of each test image in one model: of all tasks, of the backbone that
# hands its context to each task alone, and of the plain ViT.
_PASSES_TOGETHER = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Left:
  """What is left to do of a task with a regime.

  Attributes:
    task: its name.
    regime: by which it is learned.
    steps: of search and final run, those that are not finished.
    examples: to train on, of the larger of these; 0 where both are finished.
    tests: images on which seeds are tested.
  """

  task: str
  regime: str
  steps: int
  examples: int
  tests: int


def forecast(bench: Benchmark) -> str:
  """List what would run, and estimate the time; write nothing.

  What is finished in the directory takes no time.

  Raises:
    MemoryVitError: for a backbone or data that cannot be used.
  """
  config = bench.config
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  backbone = open_backbone.open_backbone(config, bench.workdir, mesh)
  config = resolve.with_backbone(config, backbone)
  bench = dataclasses.replace(bench, config=config)
  require_data(bench)
  tests = {data.task.name: _size(bench, data, "test") for data in bench.tasks}
  left = [
    _left(bench, data, regime, backbone.fingerprint, tests[data.task.name])
    for data, regime in bench.pairs
  ]
  rows = [
    (
      data.task.name,
      data.name,
      f"{tests[data.task.name]:,}",
      ", ".join(
        x.regime for x in left if x.task == data.task.name and not x.steps
      ),
    )
    for data in bench.tasks
  ]
  lines = [table(("task", "data set", "test images", "finished"), rows), ""]
  lines += [f"{n} is left out: {why}" for n, why in bench.missing.items()]
  lines.append(_counted(bench))
  if any(x.steps for x in left):
    lines += _estimate(bench, left, tests, backbone, mesh)
  return "\n".join(lines)


def _size(bench: Benchmark, data: TaskData, role: str) -> int:
  """Examples of a split of the final run."""
  config = protocol.final_config(bench, data, bench.regimes[0], {})
  return datasets.open_on_all_processes(configured_splits(config)[role]).size


def _left(
  bench: Benchmark, data: TaskData, regime: str, fingerprint: str, tests: int
) -> _Left:
  """What is not finished of a task with a regime."""
  directory = run_directory(bench.workdir, data.task.name, regime)
  search = protocol.search_config(bench, data, regime)
  done = finished_runs.find(search, directory / "search", fingerprint)
  choice = protocol.choose(search, done) if done else None
  settings = choice.settings if choice else {}
  final = protocol.final_config(bench, data, regime, settings)
  ended = choice and finished_runs.find(final, directory / "final", fingerprint)
  steps, examples = 0, 0
  if not done:
    steps, examples = _length(search)
  if not ended and (choice or not done):  # else all settings diverged
    more, examples = _length(final)
    steps += more
  return _Left(
    task=data.task.name,
    regime=regime,
    steps=steps,
    examples=examples,
    tests=tests if steps else 0,
  )


def _length(config: Config) -> tuple[int, int]:
  """Steps of a run, of all its passes, and its training examples."""
  train = datasets.open_on_all_processes(configured_splits(config)["train"])
  passes = 1
  if not REGIMES[config.regime].shares_pass:
    passes = config.sweep.combinations
  return passes * resolve.steps_of(config, train.size), train.size


def _counted(bench: Benchmark) -> str:
  """How many runs and trials there are, finished or not."""
  trials = 0
  for data, regime in bench.pairs:
    search = protocol.search_config(bench, data, regime)
    trials += search.sweep.combinations + len(bench.seeds)
  return (
    f"{2 * len(bench.pairs)} runs of {trials} trials: {len(bench.tasks)} tasks "
    f"with {', '.join(bench.regimes)}, {len(bench.seeds)} seeds."
  )


def _estimate(
  bench: Benchmark,
  left: Sequence[_Left],
  tests: Mapping[str, int],
  backbone: Backbone,
  mesh: Mesh,
) -> list[str]:
  """Time steps and a pass, and multiply."""
  image = timing.pass_seconds(bench.config, backbone, mesh)
  shown, total, most = [], 0.0, 0
  for regime in bench.regimes:
    mine = [x for x in left if x.regime == regime and x.steps]
    if not mine:
      continue
    cost = _step_cost(bench, regime, backbone, mesh)
    shown.append(f"{regime} {cost.seconds:.3g}")
    total += cost.seconds * sum(x.steps for x in mine)
    total += image * sum(x.tests for x in mine)
    kept = max(x.examples for x in mine)
    most = max(most, kept * cost.row_bytes)
    if cost.row_bytes:  # once in the search, once in the final run
      total += 2 * image * sum(x.examples for x in mine)
  if any(REGIMES[regime].composes for regime in bench.regimes):
    total += _PASSES_TOGETHER * image * sum(tests.values())
  device = jax.devices()[0].device_kind
  lines = [
    f"About {progress.duration(total)} left on {len(jax.devices())} x "
    f"{device}, an estimate: seconds of a step of {bench.config.batch_size} "
    f"images, with as many trials as the search has: {', '.join(shown)}; "
    f"{1 / image:,.0f} images/s by the plain backbone. Compiling, and images "
    "that are read slower than the model takes them, come on top."
  ]
  if most:
    lines.append(
      f"What is kept of the images of a task takes up to {most / 2**30:.2f} "
      f"GiB ({bench.config.keep.where}); --config.keep.what=none keeps nothing."
    )
  return lines


def _step_cost(
  bench: Benchmark, regime: str, backbone: Backbone, mesh: Mesh
) -> timing.StepCost:
  """Time a step of the search of a regime, with the data of the first task."""
  config = protocol.search_config(bench, bench.tasks[0], regime)
  train = datasets.open_on_all_processes(configured_splits(config)["train"])
  config = dataclasses.replace(
    config, total_steps=resolve.steps_of(config, train.size), epochs=0.0
  )
  return timing.step_cost(config, backbone, mesh, train)

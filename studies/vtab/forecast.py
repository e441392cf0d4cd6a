"""Dry run of a benchmark: what would run, and an estimate of its time.

Steps of search and final run are timed on random images, of every regime, and
so is a pass of the plain backbone. Nothing is written.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from memory_vit.config import Config
from memory_vit.data import datasets
from memory_vit.data.split_ref import configured_splits
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import get_regime
from memory_vit.runtime import sharding
from memory_vit.runtime.progress_bar import duration
from memory_vit.runtime.tables import table
from memory_vit.train import open_backbone, resolve
from studies.paper import finished_runs
from studies.vtab import protocol, testing, timing
from studies.vtab.layout import TaskData
from studies.vtab.protocol import Benchmark
from studies.vtab.record import final_directory, search_directory
from studies.vtab.runner import require_data

# Passes of each test image in one model: of all tasks, of the backbone that
# hands its context to each task alone, and of the plain ViT.
_PASSES_TOGETHER = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
  """Work that is left of a task with a regime.

  Attributes:
    task: its name.
    regime: by which it is learned.
    search: its steps; 0 where it is finished.
    final: steps of all final runs that are not finished.
    examples: of which the frozen part is computed, once for each run.
    most: of these, in one run.
    tests: the runs that are not tested.
  """

  task: str
  regime: str
  search: int
  final: int
  examples: int
  most: int
  tests: tuple[testing.Run, ...]

  @property
  def is_finished(self) -> bool:
    """Whether there is nothing to do."""
    return not (self.search or self.final or self.tests)


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
  tests = {data.task.name: _test_images(bench, data) for data in bench.tasks}
  left = [
    left_of(bench, data, regime, backbone.fingerprint)
    for data, regime in bench.pairs
  ]
  rows = [
    (
      data.task.name,
      data.name,
      f"{tests[data.task.name]:,}",
      ", ".join(
        x.regime for x in left if x.task == data.task.name and x.is_finished
      ),
    )
    for data in bench.tasks
  ]
  lines = [table(("task", "data set", "test images", "finished"), rows), ""]
  lines += [f"{n} is left out: {why}" for n, why in bench.missing.items()]
  lines.append(_counted(bench))
  if not all(x.is_finished for x in left):
    lines += _estimate(bench, left, tests, backbone, mesh)
  return "\n".join(lines)


def _test_images(bench: Benchmark, data: TaskData) -> int:
  """Examples of the test split."""
  ref = protocol.test_split(bench, data)
  return datasets.open_on_all_processes(ref).size


def left_of(
  bench: Benchmark, data: TaskData, regime: str, fingerprint: str
) -> Left:
  """Count what is not finished of a task with a regime."""
  place = (bench.workdir, data.task.name, regime)
  config = protocol.search_config(bench, data, regime)
  done = finished_runs.find(config, search_directory(*place), fingerprint)
  choice = protocol.choose(config, done) if done else None
  search, examples = (0, 0) if done else _length(config)
  found = Left(
    task=data.task.name,
    regime=regime,
    search=search,
    final=0,
    examples=examples,
    most=examples,
    tests=(),
  )
  if done and not choice:  # all settings diverged
    return found
  settings = choice.settings if choice else {}
  for seed in bench.seeds:
    config = protocol.final_config(bench, data, regime, settings, seed)
    directory = final_directory(*place, seed)
    ended = choice and finished_runs.find(config, directory, fingerprint)
    if not ended:
      found = _with_run(found, *_length(config))
    if not ended or ended.tasks and not (directory / testing.TEST).exists():
      tests = (*found.tests, (regime, seed))
      found = dataclasses.replace(found, tests=tests)
  return found


def _with_run(left: Left, steps: int, examples: int) -> Left:
  """With a final run more."""
  return dataclasses.replace(
    left,
    final=left.final + steps,
    examples=left.examples + examples,
    most=max(left.most, examples),
  )


def _length(config: Config) -> tuple[int, int]:
  """Steps of a run, of all its passes, and its training examples."""
  train = datasets.open_on_all_processes(configured_splits(config)["train"])
  passes = 1
  if not config.learned.shares_pass:
    passes = config.sweep.combinations
  return passes * resolve.steps_of(config, train.size), train.size


def _counted(bench: Benchmark) -> str:
  """Count runs and trials, finished or not."""
  trials = 0
  for data, regime in bench.pairs:
    search = protocol.search_config(bench, data, regime)
    trials += search.sweep.combinations + len(bench.seeds)
  runs = len(bench.pairs) * (1 + len(bench.seeds))
  return (
    f"{runs} runs of {trials} trials: {len(bench.tasks)} tasks with "
    f"{', '.join(bench.regimes)}, {len(bench.seeds)} seeds."
  )


def _estimate(
  bench: Benchmark,
  left: Sequence[Left],
  tests: Mapping[str, int],
  backbone: Backbone,
  mesh: Mesh,
) -> list[str]:
  """Time steps and a pass, and multiply."""
  image = timing.pass_seconds(bench.config, backbone, mesh)
  shown, total, most = [], 0.0, 0
  for regime in bench.regimes:
    mine = [x for x in left if x.regime == regime and (x.search or x.final)]
    if not mine:
      continue
    search, final = _step_costs(bench, regime, backbone, mesh)
    shown.append(f"{regime} {search.seconds:.3g} and {final.seconds:.3g}")
    total += search.seconds * sum(x.search for x in mine)
    total += final.seconds * sum(x.final for x in mine)
    most = max(most, search.row_bytes * max(x.most for x in mine))
    if search.row_bytes:  # once in each run
      total += image * sum(x.examples for x in mine)
  for name, images in tests.items():
    runs = [run for x in left if x.task == name for run in x.tests]
    total += image * images * testing.backbone_passes(runs)
  if any(get_regime(regime).composes for regime in bench.regimes):
    total += _PASSES_TOGETHER * image * sum(tests.values())
  device = jax.devices()[0].device_kind
  timed = (
    f"seconds of a step of {bench.config.batch_size} images, of the search "
    f"with all its trials and of a final run: {', '.join(shown)}; "
  )
  lines = [
    f"About {duration(total)} left on {len(jax.devices())} x "
    f"{device}, an estimate: {timed if shown else ''}"
    f"{1 / image:,.0f} images/s by the plain backbone. Compiling, and images "
    "that are read slower than the model takes them, come on top."
  ]
  if most:
    lines.append(
      f"What is kept of the images of a task takes up to {most / 2**30:.2f} "
      f"GiB ({bench.config.keep.where}); --config.keep.what=none keeps nothing."
    )
  return lines


def _step_costs(
  bench: Benchmark, regime: str, backbone: Backbone, mesh: Mesh
) -> tuple[timing.StepCost, timing.StepCost]:
  """Time steps of the search and of a final run, on data of the first task."""
  data, seed = bench.tasks[0], bench.seeds[0]
  search, final = (
    _step_cost(config, backbone, mesh)
    for config in (
      protocol.search_config(bench, data, regime),
      protocol.final_config(bench, data, regime, {}, seed),
    )
  )
  return search, final


def _step_cost(
  config: Config, backbone: Backbone, mesh: Mesh
) -> timing.StepCost:
  """Time a step of a run."""
  train = datasets.open_on_all_processes(configured_splits(config)["train"])
  config = dataclasses.replace(
    config, total_steps=resolve.steps_of(config, train.size), epochs=0.0
  )
  return timing.step_cost(config, backbone, mesh, train)

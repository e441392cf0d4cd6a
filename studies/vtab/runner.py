"""Runs a benchmark: search, final runs and tests, then the report."""

import dataclasses
import functools
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from memory_vit.config import Config, to_dict
from memory_vit.data import datasets
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import ConfigError
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import get_regime
from memory_vit.run_result import RunResult
from memory_vit.runtime import files, paths, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.preemption import StopSignal
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.tasks import store
from memory_vit.train import consistency, open_backbone, resolve, wandb_run
from studies.paper import finished_runs
from studies.vtab import (
  changed_data,
  protocol,
  report,
  testing,
  together,
)
from studies.vtab.layout import TaskData
from studies.vtab.protocol import Benchmark
from studies.vtab.record import (
  BenchmarkRecord,
  Score,
  final_directory,
  search_directory,
  task_directory,
  write_record,
)
from studies.vtab.tasks import TASKS
from studies.vtab.testing import Run, TaskScore

logger = logging.getLogger(__name__)


def run_benchmark(bench: Benchmark, stop: StopSignal | None = None) -> None:
  """Learn and test every task, and write the report after each.

  What is finished is not repeated.

  Raises:
    MemoryVitError: as `run.train_and_evaluate`; ConfigError also where a run
      was finished with another configuration, or its data have changed.
    Interrupted: where `stop` says so; the same command goes on.
  """
  workdir = bench.workdir
  consistency.require_same_start(bench.config)
  processes.require_same(
    "benchmark",
    {
      "tasks": [data.task.name for data in bench.tasks],
      "--regimes": bench.regimes,
      "--seeds": bench.seeds,
    },
  )
  wandb_run.require_login(bench.config)
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )
  with only_run(workdir):
    processes.require_shared(workdir)
    _run(bench, stop or StopSignal())


def _run(bench: Benchmark, stop: StopSignal) -> None:
  """`run_benchmark` in a directory to which no other process writes."""
  mesh = sharding.make_mesh(fsdp=bench.config.mesh.fsdp)
  backbone = open_backbone.open_backbone(bench.config, bench.workdir, mesh)
  config = resolve.with_backbone(bench.config, backbone)
  bench = dataclasses.replace(bench, config=config)
  require_data(bench)
  record = _begun(bench, backbone)
  scores: list[Score] = []
  directories = _directories(bench)
  done = sum(finished_runs.ending_of(path) is not None for path in directories)
  with ProgressBar(
    "VTAB-1k", len(directories), "runs", done=done, delay=0
  ) as bar:
    learner = _Learner(bench, backbone, stop, bar)
    for data in bench.tasks:
      learned = [learner.learn(data, regime) for regime in bench.regimes]
      runs = {run: path for each in learned for run, path in each.runs.items()}
      tests = testing.finish(bench, data, runs, backbone, mesh, stop)
      processes.on_process_0(functools.partial(_remove_backbones, runs))
      scores += [_with_tests(each, tests) for each in learned]
      record = dataclasses.replace(
        record, scores=tuple(dataclasses.asdict(score) for score in scores)
      )
      processes.on_process_0(functools.partial(_report, bench.workdir, record))
      logger.info("%s is in %s", data.task.name, bench.workdir / "report.md")
  together.measure_once(bench, scores, backbone, mesh, stop)
  processes.on_process_0(lambda: report.write_report(bench.workdir))


def require_data(bench: Benchmark) -> None:
  """Open all splits: a wrong one must not cost the tasks before it.

  Raises:
    DataError: for one that cannot be opened.
    ConfigError: for data with other classes than the task has, and options
      that a regime refuses.
  """
  for data, regime in bench.pairs:
    protocol.search_config(bench, data, regime)
  for data in bench.tasks:
    regime, seed = bench.regimes[0], bench.seeds[0]
    config = protocol.final_config(bench, data, regime, {}, seed)
    train = configured_splits(config)["train"]
    for ref in (train, protocol.test_split(bench, data)):
      reader = datasets.open_on_all_processes(ref)
      if reader.num_classes != data.task.classes:
        raise ConfigError(
          f"{reader.source} has {reader.num_classes} classes, "
          f"{data.task.name} of VTAB-1k has {data.task.classes}: expected the "
          f"data of the benchmark in {data.dir}, or --only without "
          f"{data.task.name}."
        )


def _directories(bench: Benchmark) -> list[Path]:
  """Those of all runs: of each pair a search, and a final run of every seed."""
  found = []
  for data, regime in bench.pairs:
    name = data.task.name
    found.append(search_directory(bench.workdir, name, regime))
    found += [
      final_directory(bench.workdir, name, regime, seed) for seed in bench.seeds
    ]
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Learned:
  """A task that was learned by a regime, before it is tested.

  Attributes:
    score: without what the test split says.
    runs: {regime and seed: directory}, of the seeds that did not diverge.
  """

  score: Score
  runs: Mapping[Run, Path] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Learner:
  """Learns tasks, or finds that they were learned before."""

  bench: Benchmark
  backbone: Backbone
  stop: StopSignal
  bar: ProgressBar

  def learn(self, data: TaskData, regime: str) -> _Learned:
    """Search, choose, and learn again with every seed."""
    bench, name = self.bench, data.task.name
    directory = search_directory(bench.workdir, name, regime)
    config = protocol.search_config(bench, data, regime)
    searched = self._finish(config, directory)
    choice = protocol.choose(config, searched)
    # Of the search only the choice is kept: with all its trials, `full` would
    # hold many backbones.
    processes.on_process_0(lambda: _remove_tasks(directory))
    score = Score(
      task=name,
      regime=regime,
      tried=config.sweep.combinations,
      seeds=len(bench.seeds),
      trials=config.sweep.combinations,
    )
    if choice is None:  # there is nothing to learn again
      self.bar.total = (self.bar.total or 0) - len(bench.seeds)
      diverged = dataclasses.replace(score, diverged=score.tried)
      return _Learned(score=_with_cost(diverged, [searched]))
    results, runs = [], {}
    for seed in bench.seeds:
      config = protocol.final_config(bench, data, regime, choice.settings, seed)
      directory = final_directory(bench.workdir, name, regime, seed)
      results.append(self._finish(config, directory))
      if results[-1].tasks:
        runs[regime, seed] = directory
    first = next(iter(runs.values()), None)
    if first and not get_regime(regime).holds_backbone:
      there = task_directory(bench.workdir, name, regime)
      processes.on_process_0(lambda: export(first, there, name, self.backbone))
    sizes = [task.trainable_params for run in results for task in run.tasks]
    score = dataclasses.replace(
      score,
      settings=dict(choice.settings),
      validation=choice.validation,
      at_edge=choice.at_edge,
      diverged=choice.diverged,
      trials=score.trials + score.seeds,
      parameters=sizes[0] if sizes else 0,
    )
    score = _with_cost(score, [searched, *results])
    return _Learned(score=score, runs=runs)

  def _finish(self, config: Config, directory: Path) -> RunResult:
    """Train a run; a finished one is read, if its data are as they were."""
    ending = finished_runs.ending_of(directory)
    if ending:
      refs = configured_splits(config)
      changed_data.require_same(refs, ending.data, directory)
    self.bar.note(str(directory.relative_to(self.bench.workdir)))
    fingerprint = self.backbone.fingerprint
    found = finished_runs.finish(config, directory, fingerprint, self.stop)
    if not ending:  # others were counted at the beginning
      self.bar.update()
    return found


def export(run: Path, there: Path, name: str, backbone: Backbone) -> None:
  """Keep the task of a run under its own name, by one process."""
  task = store.load_task(run / "tasks" / protocol.NAME_IN_RUNS, backbone)
  if there.exists() and store.load_task(there, backbone).digest == task.digest:
    return
  spec = dataclasses.replace(task.spec, name=name)
  with files.writing(there):
    store.save_task(dataclasses.replace(task, spec=spec), there)


def _with_tests(learned: _Learned, found: Mapping[Run, TaskScore]) -> Score:
  """What the test split says, in the order of the seeds."""
  score, tests = learned.score, [found[run] for run in learned.runs]
  first = tests[0] if tests else None
  return dataclasses.replace(
    score,
    tests=tuple(test.accuracy for test in tests),
    test_examples=first.examples if first else 0,
    skipped=first.skipped if first else 0,
    wall_seconds=score.wall_seconds + sum(test.seconds for test in tests),
  )


def _with_cost(score: Score, results: Sequence[RunResult]) -> Score:
  """What the runs of a score took."""
  sweeps = [result.sweep for result in results if result.sweep]
  return dataclasses.replace(
    score,
    passes=tuple(sweep.passes for sweep in sweeps),
    training_seconds=sum(sweep.training_seconds for sweep in sweeps),
    wall_seconds=sum(result.wall_seconds for result in results),
  )


def _remove_backbones(runs: Mapping[Run, Path]) -> None:
  """Remove the tested tasks that hold a backbone of their own."""
  for (regime, _), directory in runs.items():
    if get_regime(regime).holds_backbone:
      _remove_tasks(directory)


def _remove_tasks(directory: Path) -> None:
  """Remove the tasks that a run exported, and the model that `full` did."""
  tasks = directory / "tasks"
  if tasks.exists():
    shutil.rmtree(tasks)
  (directory / f"{protocol.NAME_IN_RUNS}.npz").unlink(missing_ok=True)


def _begun(bench: Benchmark, backbone: Backbone) -> BenchmarkRecord:
  """The record of a benchmark of which nothing is finished."""
  chosen = {data.task.name for data in bench.tasks} | {*bench.missing}
  device = jax.devices()[0]
  hardware = (
    f"{len(jax.devices())} x {device.device_kind} ({device.platform}), "
    f"{os.cpu_count()} CPU cores, jax {jax.__version__}."
  )
  return BenchmarkRecord(
    command=" ".join(["python -m studies.vtab", *sys.argv[1:]]),
    hardware=processes.broadcast_from_process_0(hardware),
    config=to_dict(bench.config),
    backbone=_described(backbone),
    regimes=bench.regimes,
    missing=dict(bench.missing),
    left_out=tuple(t.name for t in TASKS if t.name not in chosen),
  )


def _described(backbone: Backbone) -> dict[str, Any]:
  return {
    "fingerprint": backbone.fingerprint,
    "variant": backbone.config.variant,
    "image_size": backbone.config.image_size,
  }


def _report(workdir: Path, record: BenchmarkRecord) -> None:
  """Write the record, and the report from it."""
  write_record(workdir, record)
  report.write_report(workdir)

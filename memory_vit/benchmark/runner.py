"""Runs a benchmark: search and final run of every task, then the report."""

import dataclasses
import functools
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import jax

from memory_vit.benchmark import protocol, report, together
from memory_vit.benchmark.layout import TaskData
from memory_vit.benchmark.protocol import Benchmark
from memory_vit.benchmark.record import (
  BenchmarkRecord,
  Score,
  run_directory,
  task_directory,
  write_record,
)
from memory_vit.benchmark.tasks import TASKS
from memory_vit.config import Config, to_dict
from memory_vit.data import datasets, inventory
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import ConfigError, DataError
from memory_vit.model.backbone import Backbone
from memory_vit.model.regimes import REGIMES
from memory_vit.run_result import RunResult
from memory_vit.runtime import files, paths, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.preemption import StopSignal
from memory_vit.study import finished_runs
from memory_vit.tasks import store
from memory_vit.training import consistency, open_backbone, resolve

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
  learner = _Learner(bench, backbone, stop)
  record = _begun(bench, backbone)
  scores: list[Score] = []
  for data in bench.tasks:
    scores += [learner.learn(data, regime) for regime in bench.regimes]
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
    ConfigError: for data with other classes than the task has.
  """
  for data in bench.tasks:
    config = protocol.final_config(bench, data, bench.regimes[0], {})
    refs = configured_splits(config)
    for ref in (refs["train"], refs["test"]):
      reader = datasets.open_on_all_processes(ref)
      if reader.num_classes != data.task.classes:
        raise ConfigError(
          f"{reader} has {reader.num_classes} classes, {data.task.name} of "
          f"VTAB-1k has {data.task.classes}: expected the data of the "
          f"benchmark in {data.dir}, or --only without {data.task.name}."
        )


@dataclasses.dataclass(frozen=True)
class _Learner:
  """Learns tasks, or finds that they were learned before."""

  bench: Benchmark
  backbone: Backbone
  stop: StopSignal

  def learn(self, data: TaskData, regime: str) -> Score:
    """Search, choose, learn again with all seeds, and test."""
    directory = run_directory(self.bench.workdir, data.task.name, regime)
    config = protocol.search_config(self.bench, data, regime)
    searched = self._finish(config, directory / "search")
    choice = protocol.choose(config, searched)
    # Of the search only the choice is kept: with all its trials, `full` would
    # hold many backbones.
    processes.on_process_0(lambda: _remove_tasks(directory / "search"))
    score = Score(
      task=data.task.name,
      regime=regime,
      tried=config.sweep.combinations // len(config.sweep.seed),
      seeds=len(self.bench.seeds),
      trials=config.sweep.combinations,
    )
    if choice is None:
      diverged = dataclasses.replace(score, diverged=score.tried)
      return _with_cost(diverged, searched)
    config = protocol.final_config(self.bench, data, regime, choice.settings)
    final = self._finish(config, directory / "final")
    processes.on_process_0(
      lambda: self._export(data.task.name, regime, directory / "final")
    )
    score = dataclasses.replace(
      score,
      settings=dict(choice.settings),
      validation=choice.validation,
      at_edge=choice.at_edge,
      diverged=choice.diverged,
      trials=score.trials + score.seeds,
    )
    return _with_cost(_with_tests(score, final), searched, final)

  def _export(self, name: str, regime: str, final: Path) -> None:
    """Keep the task of the first seed under its own name, by one process.

    Of `full` no task is kept: each is a backbone of its own.
    """
    if REGIMES[regime].holds_backbone:
      _remove_tasks(final)
      return
    there = task_directory(self.bench.workdir, name, regime)
    trained = final / "tasks" / protocol.NAME_IN_RUNS
    if there.exists() or not trained.exists():
      return
    task = store.load_task(trained, self.backbone)
    spec = dataclasses.replace(task.spec, name=name)
    with files.writing(there, ValueError):  # orbax's
      store.save_task(dataclasses.replace(task, spec=spec), there)

  def _finish(self, config: Config, directory: Path) -> RunResult:
    """Train a run; a finished one is read, if its data are as they were."""
    if ending := finished_runs.ending_of(directory):
      problem = processes.on_process_0(
        lambda: other_data(config, ending, directory)
      )
      if problem:
        raise ConfigError(problem)
    fingerprint = self.backbone.fingerprint
    return finished_runs.finish(config, directory, fingerprint, self.stop)


def other_data(config: Config, ending: RunResult, directory: Path) -> str:
  """Say how the data of a finished run have changed; "" where they have not.

  Data that are not there any more are named in the log: what is finished does
  not need them.
  """
  for role, ref in configured_splits(config).items():
    known = ending.data.get(role)
    if not known:  # it diverged
      continue
    try:
      found = datasets.take_inventory(ref)
    except DataError as error:
      logger.warning("whether data changed is not known: %s", error)
      continue
    if inventory.digest(found.table(known["by"])) != known["sha256"]:
      record = DataRecord(
        directory=directory / "inventory",
        by=known["by"],
        inventories={role: found},
      )
      lines = record.difference(role, known)
      return (
        f"the data are not those of the finished run {directory}. Put those "
        "back, or give another --workdir.\n  " + "\n  ".join(lines)
      )
  return ""


def _with_tests(score: Score, final: RunResult) -> Score:
  """What the test split says, in the order of the seeds."""
  lost = final.sweep.lost if final.sweep else {}
  trials = sorted(final.tasks, key=lambda trial: trial.name)
  well = [trial for trial in trials if trial.name not in lost]
  tests = [t.test_accuracy for t in well if t.test_accuracy is not None]
  first = well[0] if well else None
  return dataclasses.replace(
    score,
    tests=tuple(tests),
    test_examples=first.test_examples if first else 0,
    skipped=first.test_skipped if first else 0,
    parameters=first.trainable_params if first else 0,
  )


def _with_cost(score: Score, *results: RunResult) -> Score:
  """What the runs of a score took."""
  sweeps = [result.sweep for result in results if result.sweep]
  return dataclasses.replace(
    score,
    passes=tuple(sweep.passes for sweep in sweeps),
    training_seconds=sum(sweep.training_seconds for sweep in sweeps),
    wall_seconds=sum(result.wall_seconds for result in results),
  )


def _remove_tasks(directory: Path) -> None:
  """Remove the tasks that a run exported."""
  tasks = directory / "tasks"
  if tasks.exists():
    shutil.rmtree(tasks)


def _begun(bench: Benchmark, backbone: Backbone) -> BenchmarkRecord:
  """The record of a benchmark of which nothing is finished."""
  chosen = {data.task.name for data in bench.tasks} | {*bench.missing}
  device = jax.devices()[0]
  hardware = (
    f"{len(jax.devices())} x {device.device_kind} ({device.platform}), "
    f"{os.cpu_count()} CPU cores, jax {jax.__version__}."
  )
  return BenchmarkRecord(
    command=" ".join(["python -m memory_vit.vtab", *sys.argv[1:]]),
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

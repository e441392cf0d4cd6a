"""Run a benchmark: search, final runs, tests, report."""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import memory_vit as mv
from memory_vit.data import open_run_split
from memory_vit.model import get_regime
from memory_vit.runtime import StopSignal, on_process_0
from studies import grid
from studies.grid import Grid
from studies.record import directory_of
from studies.vtab import protocol, report, testing, together
from studies.vtab.layout import TaskData
from studies.vtab.protocol import Benchmark
from studies.vtab.scores import Score
from studies.vtab.tasks import TASKS
from studies.vtab.testing import Run, TaskScore


def run_benchmark(
  bench: Benchmark,
  workdir: Path,
  *,
  command: str,
  stop: StopSignal | None = None,
) -> None:
  """Train and test every task, and write the report after each."""
  given = bench.config
  options = {
    "tasks": [data.task.name for data in bench.tasks],
    "regimes": [*bench.regimes],
    "seeds": [*bench.seeds],
  }
  with grid.opened(given, workdir, options, stop) as engine:
    bench = dataclasses.replace(bench, config=engine.config)
    require_data(bench)
    plan = plan_of(bench, bench.tasks)
    results = engine.finished(plan)
    scores: list[Score] = []

    def write_report() -> None:
      engine.report(
        report.write_report,
        results,
        command=command,
        config=given,
        options=_options(bench, scores),
      )

    for data in bench.tasks:
      engine.train(plan_of(bench, [data]), results)
      runs: dict[Run, Path] = {}
      for regime in bench.regimes:
        runs |= _runs_to_test(engine, bench, data, regime, results)
      tests = testing.finish(engine, bench, data, runs)
      on_process_0(functools.partial(_remove_backbones, runs))
      scores += [
        _score(bench, data, regime, results, tests) for regime in bench.regimes
      ]
      write_report()
    together.measure_once(engine, bench, scores)
    write_report()


def forecast(bench: Benchmark, workdir: Path) -> str:
  """List the runs and estimate their time; creates no file."""
  require_data(bench, prepared=True)

  def plan(config: mv.Config) -> grid.Plan:
    return plan_of(dataclasses.replace(bench, config=config), bench.tasks)

  lines = [f"{name} is left out: {why}" for name, why in bench.missing.items()]
  return "\n".join(
    [*lines, grid.forecast(*grid.finished_before(bench.config, workdir, plan))]
  )


def require_data(bench: Benchmark, *, prepared: bool = False) -> None:
  """Open all splits, so that a wrong one fails before any training."""
  for data, regime in bench.pairs:
    protocol.search_config(bench, data, regime)
  for data in bench.tasks:
    config = protocol.test_config(bench, data)
    for role in ("train", "test"):
      reader = open_run_split(config, role, prepared=prepared)
      if reader.num_classes != data.task.classes:
        raise mv.MemoryVitError(
          f"{reader} has {reader.num_classes} classes, "
          f"{data.task.name} of VTAB-1k has {data.task.classes}: expected the "
          f"data of the benchmark in {data.dir}, or --only without "
          f"{data.task.name}."
        )


def search_name(task: str, regime: str) -> str:
  return f"{task}/{regime}/search"


def final_name(task: str, regime: str, seed: int) -> str:
  return f"{task}/{regime}/seed-{seed}"


def plan_of(bench: Benchmark, tasks: Sequence[TaskData]) -> grid.Plan:
  """The runs of tasks: for each regime a search, then the seeds."""

  def plan(results: Mapping[str, mv.RunResult]) -> list[grid.Run]:
    return [
      run
      for data in tasks
      for regime in bench.regimes
      for run in _runs_of(bench, data, regime, results)
    ]

  return plan


def _runs_of(
  bench: Benchmark,
  data: TaskData,
  regime: str,
  results: Mapping[str, mv.RunResult],
) -> list[grid.Run]:
  """The runs of a task with a regime; only the search if all diverged."""
  name = search_name(data.task.name, regime)
  search = functools.partial(protocol.search_config, bench, data, regime)
  runs = [grid.Run(name=name, configure=search, kind=f"{regime}, search")]
  choice = None
  if name in results:
    choice = protocol.choose(search(), results[name])
    if choice is None:  # all diverged
      return runs

  def final(seed: int) -> Callable[[], mv.Config] | None:
    if choice is None:  # not known yet
      return None
    return functools.partial(
      protocol.final_config, bench, data, regime, choice.settings, seed
    )

  return runs + [
    grid.Run(
      name=final_name(data.task.name, regime, seed),
      configure=final(seed),
      kind=f"{regime}, final",
    )
    for seed in bench.seeds
  ]


def _runs_to_test(
  engine: Grid,
  bench: Benchmark,
  data: TaskData,
  regime: str,
  results: grid.Results,
) -> dict[Run, Path]:
  """The final runs that converged; exports the task of the first one."""
  name, workdir = data.task.name, engine.workdir
  # With the tasks of all its trials, a search of `full` holds many backbones.
  searched_in = directory_of(workdir, search_name(name, regime))
  on_process_0(lambda: _remove_tasks(searched_in))
  finals = {seed: final_name(name, regime, seed) for seed in bench.seeds}
  runs = {
    (regime, seed): directory_of(workdir, run)
    for seed, run in finals.items()
    if run in results and results[run].tasks
  }
  first = next(iter(runs.values()), None)
  if first and not get_regime(regime).holds_backbone:
    kept = together.task_directory(workdir, name, regime)
    on_process_0(lambda: export(first, kept, name, engine.backbone))
  return runs


def _score(
  bench: Benchmark,
  data: TaskData,
  regime: str,
  results: grid.Results,
  tests: Mapping[Run, TaskScore],
) -> Score:
  """Summarize the runs of a task with a regime, and their tests."""
  name = data.task.name
  config = protocol.search_config(bench, data, regime)
  searched = results[search_name(name, regime)]
  choice = protocol.choose(config, searched)
  tried = config.sweep.combinations
  chosen: dict[str, Any] = {"tried": tried, "diverged": tried}
  finals = []
  if choice:
    chosen = dataclasses.asdict(choice)
    finals = [results[final_name(name, regime, s)] for s in bench.seeds]
  runs = [searched, *finals]
  sweeps = [result.sweep for result in runs if result.sweep]
  tested = [tests[regime, s] for s in bench.seeds if (regime, s) in tests]
  sizes = [task.trainable_params for run in finals for task in run.tasks]
  return Score(
    task=name,
    regime=regime,
    **chosen,
    tests=tuple(test.accuracy for test in tested),
    seeds=len(bench.seeds),
    trials=tried + len(finals),
    test_examples=tested[0].examples if tested else 0,
    skipped=tested[0].skipped if tested else 0,
    parameters=sizes[0] if sizes else 0,
    passes=tuple(sweep.passes for sweep in sweeps),
    training_seconds=sum(sweep.training_seconds for sweep in sweeps),
    wall_seconds=sum(result.wall_seconds for result in runs)
    + sum(test.seconds for test in tested),
  )


def export(run: Path, kept: Path, name: str, backbone: mv.Backbone) -> None:
  """Save the task of a run under its own name, by one process."""
  task = mv.load_task(run / "tasks" / protocol.NAME_IN_RUNS, backbone)
  if kept.exists() and mv.load_task(kept, backbone).digest == task.digest:
    return
  spec = dataclasses.replace(task.spec, name=name)
  mv.save_task(dataclasses.replace(task, spec=spec), kept)


def _remove_backbones(runs: Mapping[Run, Path]) -> None:
  """Remove the tested tasks that hold a backbone of their own."""
  for (regime, _), directory in runs.items():
    if get_regime(regime).holds_backbone:
      _remove_tasks(directory)


def _remove_tasks(directory: Path) -> None:
  """Remove the tasks that a run exported, and the model of `full`."""
  tasks = directory / "tasks"
  if tasks.exists():
    shutil.rmtree(tasks)
  (directory / f"{protocol.NAME_IN_RUNS}.npz").unlink(missing_ok=True)


def _options(bench: Benchmark, scores: Sequence[Score]) -> dict[str, Any]:
  """What the report needs besides the configuration."""
  chosen = {data.task.name for data in bench.tasks} | {*bench.missing}
  return {
    "regimes": bench.regimes,
    "missing": dict(bench.missing),
    "left_out": [task.name for task in TASKS if task.name not in chosen],
    "scores": [dataclasses.asdict(score) for score in scores],
  }

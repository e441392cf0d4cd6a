"""Run a study: train, measure, and make the report."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import memory_vit as mv
from memory_vit.runtime import StopSignal
from studies import grid
from studies.grid import Grid
from studies.paper import (
  costs,
  interference,
  measured_costs,
  measured_interference,
  plan,
  report,
)
from studies.paper.runs import PaperRun, config_of
from studies.paper.selection import best_parent
from studies.paper.study import Study
from studies.paper.trials import Trials


def run_study(
  study: Study,
  workdir: Path,
  parts: Sequence[str],
  *,
  command: str,
  stop: StopSignal | None = None,
) -> None:
  """Train and measure parts, and write the report after each of them."""
  given = study.config
  options = {**study.options, "only": [*parts]}
  with grid.opened(given, workdir, options, stop) as engine:
    study = dataclasses.replace(study, config=engine.config)
    results = engine.finished(grid_plan(study, study.parts(), workdir))
    grid.require_data(grid_plan(study, parts, workdir), results)
    vit = engine.backbone.config
    for part in parts:
      engine.train(grid_plan(study, [part], workdir), results)
      if part == "costs":
        engine.measure_once(
          "costs.json",
          lambda: costs.key(study, vit, grid.hardware()),
          lambda: measured_costs.measure(study, vit),
        )
      if part == "interference":
        _measure_interference(engine, study, results)
      engine.report(
        report.write_report,
        results,
        command=command,
        config=given,
        options=study.options,
      )


def forecast(study: Study, workdir: Path, parts: Sequence[str]) -> str:
  """List the runs and estimate their time; creates no file."""

  def plan_of(config: mv.Config) -> grid.Plan:
    settled = dataclasses.replace(study, config=config)
    return grid_plan(settled, parts, workdir)

  runs, results = grid.finished_before(study.config, workdir, plan_of)
  grid.require_data(runs, results, prepared=True)
  return grid.forecast(runs, results)


def _measure_interference(
  engine: Grid, study: Study, results: grid.Results
) -> None:
  """Evaluate the best tasks side by side, unless one diverged."""
  trials = plan.known_trials(study, ["interference"], results, engine.workdir)
  every = [trial for found in trials.values() for trial in found]
  if tasks := interference.best_tasks(study, every):
    engine.measure_once(
      "interference.json",
      lambda: interference.key(study, tasks),
      lambda: measured_interference.measure(study, tasks, engine.backbone),
    )


def grid_plan(study: Study, parts: Sequence[str], workdir: Path) -> grid.Plan:
  """The plan of some parts, for the engine."""

  def runs(results: Mapping[str, mv.RunResult]) -> list[grid.Run]:
    trials = plan.known_trials(study, parts, results, workdir)
    return [
      grid.Run(
        name=run.name,
        configure=_configure(study, run, trials),
        kind=f"{run.regime} ({len(run.trials) or 1})",
      )
      for run in plan.plan(study, parts, trials)
      if not plan.lacks_parent(study, run, trials)
    ]

  return runs


def _configure(
  study: Study, run: PaperRun, trials: Trials
) -> Callable[[], mv.Config] | None:
  """The configuration of a run; None until its dependencies finish."""
  if not run.learning_rates or run.reads and run.reads.name not in trials:
    return None
  parent = run.reads and best_parent(run.reads, trials, study.task.cells)
  reads = [parent.task] if parent and parent.task else []
  return lambda: config_of(study, run, reads)

"""Runs a study: trains and measures into files, and has the report made."""

import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit.config import Config
from memory_vit.model.backbone import Backbone
from memory_vit.runtime import paths, processes, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.preemption import StopSignal
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.train import consistency, open_backbone, resolve, wandb_run
from memory_vit.train.run import make_backbone
from memory_vit.train.run_context import RunContext
from studies.paper import (
  costs,
  execute,
  finished_runs,
  interference,
  plan,
  report,
)
from studies.paper.execute import Executor
from studies.paper.record import (
  StudyRecord,
  read_measured,
  write_measured,
  write_record,
)
from studies.paper.runs import Run, possible_parts
from studies.paper.trials import Trials, directory_of

logger = logging.getLogger(__name__)


def run_study(
  config: Config,
  workdir: Path,
  parts: Sequence[str],
  stop: StopSignal | None = None,
) -> None:
  """Measure what parts need, and write the report after each of them.

  The report has all parts for which everything was measured, now or before.

  Args:
    config: of the study.
    workdir: where its runs, what it measured and its report are kept.
    parts: from `runs.possible_parts`.
    stop: see `run.train_and_evaluate`.

  Raises:
    MemoryVitError: as `run.train_and_evaluate`.
    Interrupted: where `stop` says so; what ran so far is not run again.
  """
  consistency.require_same_start(config)
  processes.require_same("parts", {"--only": list(parts)})
  wandb_run.require_login(config)
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )
  mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
  with only_run(workdir) as require_alone:
    context = RunContext(
      mesh, stop or StopSignal(), require_alone=require_alone
    )
    _run_study(config, workdir, parts, context)


def _run_study(
  config: Config, workdir: Path, parts: Sequence[str], context: RunContext
) -> None:
  """`run_study` in a directory to which no other process writes."""
  mesh, stop = context.mesh, context.stop
  processes.require_shared(workdir)
  make_backbone(config, workdir, context)
  backbone, file = open_backbone.study_backbone(config, workdir, mesh)
  config = resolve.with_backbone(config, backbone)
  record = StudyRecord(
    command=" ".join(["python -m studies.paper", *sys.argv[1:]]),
    hardware=processes.broadcast_from_process_0(_hardware()),
    config=config,
    backbone=backbone.config,
  )
  executor = Executor(config, workdir, file, backbone.fingerprint, stop)
  trials = executor.finished(possible_parts(config))
  for name in trials:  # of one that was killed once it was finished
    finished_runs.remove_checkpoints(directory_of(workdir, name))
  execute.require_data(config, plan.plan(config, parts, trials), trials)
  done = _finished(plan.plan(config, parts, trials), trials)
  with ProgressBar("study", unit="runs", done=done, delay=0) as bar:
    for part in parts:
      while planned := plan.next_run(config, part, trials):
        _show(bar, plan.plan(config, parts, trials), trials)
        trials[planned.name] = executor.train(planned, trials)
      _show(bar, plan.plan(config, parts, trials), trials)
      if part == "costs":
        _measure_once(
          workdir / "costs.json",
          lambda: costs.key(record),
          lambda: costs.measure(record),
        )
      if part == "interference":
        _measure_interference(config, workdir, trials, backbone, mesh)
      now = dataclasses.replace(record, runs=tuple(trials))
      processes.on_process_0(functools.partial(_report, workdir, now))
      logger.info("%s is in %s", part, workdir / "report.md")


def _show(bar: ProgressBar, planned: Sequence[Run], trials: Trials) -> None:
  """Show which run it is, of how many that are known of by now."""
  bar.total = len(planned)
  bar.reach(_finished(planned, trials))


def _finished(planned: Sequence[Run], trials: Trials) -> int:
  """How many of some runs are finished."""
  return sum(run.name in trials for run in planned)


def _measure_interference(
  config: Config, workdir: Path, trials: Trials, backbone: Backbone, mesh: Mesh
) -> None:
  """Evaluate the best tasks side by side, unless one of them diverged."""
  runs = plan.runs_of(config, "interference", trials)
  mine = [trial for planned in runs for trial in trials[planned.name]]
  if tasks := interference.best_tasks(config, mine):
    _measure_once(
      workdir / "interference.json",
      lambda: interference.key(config, tasks),
      lambda: interference.measure(config, tasks, backbone, mesh),
    )


def _measure_once(
  file: Path, key: Callable[[], Any], measure: Callable[[], Any]
) -> None:
  """Measure into a file, unless it holds this already."""
  now = processes.on_process_0(key)
  if processes.on_process_0(lambda: read_measured(file, now)) is None:
    write_measured(file, now, measure())


def _report(workdir: Path, record: StudyRecord) -> None:
  """Write the record of a study, and the report from it."""
  write_record(workdir, record)
  report.write_report(workdir)


def _hardware() -> str:
  """Devices and versions of this session of the study."""
  devices = jax.devices()
  return (
    f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), "
    f"{os.cpu_count()} CPU cores, jax {jax.__version__}."
  )

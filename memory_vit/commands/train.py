"""Trains (or resumes), evaluates and exports a task.

  memory-vit train --config=sun397 --workdir=DIR \\
    [--config.KEY=VALUE ...] [--allow_changed_data] [--dry_run]
  memory-vit train --config=sun397 --dry_run --topology=v5e:4x4

Run the same command to resume an interrupted run. SIGTERM (preemption) and
Ctrl-C save the state and end the run, with exit status 75 and 130. A second
signal ends the run at once. The exit status is 2 for bad input.

For several processes, which share DIR, see docs/scale.md of the repository.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from etils import epy

from memory_vit.commands import command_line, console, option_help
from memory_vit.commands.absent_options import AbsentDevices
from memory_vit.config import Config
from memory_vit.runtime import launch, paths

with epy.lazy_imports():  # delay slow imports until the options are checked
  import jax

  from memory_vit.runtime import preemption
  from memory_vit.train import dry_run, progress, run, summary, topology_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments:
  config: Config
  workdir: Path | None  # None: only plan the run, for absent devices
  allow_changed_data: bool
  dry_run: bool
  verbose: bool
  processes: launch.Options
  absent: AbsentDevices


def main(argv: Sequence[str]) -> int:
  """Run the command and exit."""
  arguments = console.parsed(lambda: parse(["memory-vit train", *argv]))
  with launch.leaving():
    sys.exit(console.run_command(lambda: execute(arguments)))


def parse(argv: Sequence[str]) -> TrainArguments:
  """Read the command line, and run its configuration file."""
  line = command_line.CommandLine(option_help.docstring(__file__), argv)
  workdir = line.required_string(
    "workdir", "Directory of results; local, or gs://BUCKET/DIRECTORY."
  )
  allow_changed_data = line.switch(
    "allow_changed_data", "Resume even if the data of the run has changed."
  )
  dry_run = line.switch(
    "dry_run", "Show steps, cached bytes and seconds; train nothing."
  )
  verbose = line.switch("verbose", "Also log a table of trained parameters.")
  processes = line.options(launch.Options)
  absent = line.options(AbsentDevices)
  config = line.parse()
  absent().require_dry_run(dry_run())
  return TrainArguments(
    config=config,
    workdir=None if absent().device else paths.place(workdir(), "--workdir"),
    allow_changed_data=allow_changed_data(),
    dry_run=dry_run(),
    verbose=verbose(),
    processes=processes(),
    absent=absent(),
  )


def execute(arguments: TrainArguments) -> int:
  """Run the configuration; return the exit status."""
  progress.log_to_stderr(verbose=arguments.verbose)
  if arguments.workdir is None:
    print(_plan(arguments))
    return 0
  launch.start(arguments.processes)
  logging.getLogger("memory_vit").info("devices: %s", jax.devices())
  if arguments.dry_run:
    text = dry_run.dry_run(arguments.config, arguments.workdir)
    if jax.process_index() == 0:
      print(text)
    return 0
  stop = preemption.StopSignal()
  with stop.listening():
    result = run.train_and_evaluate(
      arguments.config,
      arguments.workdir,
      stop,
      allow_changed_data=arguments.allow_changed_data,
    )
  if jax.process_index() == 0:
    print(summary.summary(result, arguments.workdir))
  return 0


def _plan(arguments: TrainArguments) -> str:
  """Describe a run on devices that this machine lacks; do not run it."""
  jax.config.update("jax_platforms", "cpu")  # do not look for GPUs or TPUs
  absent = arguments.absent
  return topology_plan.plan(
    arguments.config,
    absent.device,
    classes=absent.classes,
    examples=absent.examples,
  )

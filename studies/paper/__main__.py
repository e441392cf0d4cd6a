"""Runs the paper's study on the data set of a configuration.

  python -m studies.paper --config=cifar100 --workdir=DIR \\
    [--only=PART ...] [--dry_run] [--config.KEY=VALUE ...]
  python -m studies.paper --workdir=DIR --report_only

DIR then holds report.md, report.json, plots, and in runs/NAME every run as
`memory-vit train` would leave it, without its saved states. A study that was
interrupted goes on when the same command is given again; a run is never
repeated. Parts: see `runs.PARTS`, options: `config.StudyConfig`. The report
holds all parts that are measured, now or before. --dry_run shows the runs and
about how long they will take, and trains nothing. --report_only makes the
report again of the files in DIR alone: it needs neither jax nor --config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from etils import epy

from memory_vit.commands import command_line, console
from memory_vit.config import Config
from memory_vit.errors import ConfigError
from memory_vit.runtime import launch, paths
from studies.paper import runs

with epy.lazy_imports():  # once the command line is known to be right
  import jax

  from memory_vit.runtime import preemption
  from memory_vit.train import progress
  from studies.paper import forecast, report, runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperArguments:
  """The command line, parsed; an empty `only` stands for all parts."""

  config: Config
  workdir: Path
  only: tuple[str, ...]
  dry_run: bool
  report_only: bool
  processes: launch.Options


def main(argv: Sequence[str]) -> int:
  """Run the command; end the process where other processes take part."""
  arguments = console.parsed(lambda: parse(["python -m studies.paper", *argv]))
  # No other process has a part in the report, and jax is not needed.
  alone = contextlib.nullcontext
  with alone() if arguments.report_only else launch.leaving():
    sys.exit(console.run_command(lambda: execute(arguments)))


def parse(argv: Sequence[str]) -> PaperArguments:
  """Read the command line, and run its configuration file.

  Raises:
    ConfigError: for what cannot be used.
  """
  line = command_line.CommandLine(__doc__, argv)
  workdir = line.required_string("workdir", "Where results are written.")
  only = line.strings(
    "only", f"A part; may be given several times: {', '.join(runs.PARTS)}."
  )
  dry_run = line.switch("dry_run", "Show the runs, train nothing.")
  processes = line.options(launch.Options)
  report_only = line.switch(
    "report_only", "Make the report again, of the files in --workdir alone."
  )
  config = line.parse(needs_config=lambda: not report_only())
  directory = paths.local(workdir(), "--workdir")
  if not report_only():
    runs.possible_parts(config, only())
  elif only() or dry_run():
    raise ConfigError(
      "--report_only shows all that is measured: expected neither --only nor "
      "--dry_run."
    )
  return PaperArguments(
    config=config,
    workdir=directory,
    only=tuple(only()),
    dry_run=dry_run(),
    report_only=report_only(),
    processes=processes(),
  )


def execute(arguments: PaperArguments) -> int:
  """Run the study, or show its plan or report; return the exit status."""
  config, workdir = arguments.config, arguments.workdir
  if arguments.report_only:
    report.write_report(workdir)
    return _show_report(workdir)
  progress.log_to_stderr()
  launch.start(arguments.processes)
  parts = runs.possible_parts(config, arguments.only)
  if not arguments.only:
    runs.log_missing_parts(config)
  if arguments.dry_run:
    text = forecast.forecast(config, workdir, parts)
    if jax.process_index() == 0:
      print(text)
    return 0
  stop = preemption.StopSignal()
  with stop.listening():
    runner.run_study(config, workdir, parts, stop)
  return _show_report(workdir) if jax.process_index() == 0 else 0


def _show_report(workdir: Path) -> int:
  """Print report.md."""
  print((workdir / "report.md").read_text(encoding="utf-8"))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

"""Parse and run the commands of studies: flags, processes, signals, errors."""

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import logging as absl_logging

import memory_vit as mv
from memory_vit.commands import CommandLine, run_command
from memory_vit.runtime import ProcessOptions, leaving, log_package

if TYPE_CHECKING:
  from memory_vit.runtime import StopSignal

# A child of the logger that commands show.
logger = logging.getLogger("memory_vit.studies")


class StudyLine:
  """The command line of a study: its own flags and the common ones.

  Attributes:
    line: on which a study declares its own flags, before `parse`.
    config: from --config and --config.KEY=VALUE.
    workdir: --workdir.
    only: --only, split at commas; empty for all.
    dry_run: --dry_run.
    report_only: --report_only.
    processes: --coordinator and others.
  """

  def __init__(
    self, about: str, argv: Sequence[str], only: str, default: str = ""
  ) -> None:
    """Declare the common flags.

    Args:
      about: the first text of --help.
      argv: arguments, without the name of the program.
      only: help text of --only.
      default: of --config, which is required if this is empty.
    """
    if default and not any(a.startswith("--config=") for a in argv):
      argv = [f"--config={default}", *argv]
    self.line = CommandLine(about, ["study", *argv])
    self._workdir = self.line.required_string(
      "workdir", "Where results are written."
    )
    self._only = self.line.strings("only", only)
    self._dry_run = self.line.switch("dry_run", "Show the runs, train nothing.")
    self._report_only = self.line.switch(
      "report_only", "Make the report again, from the files in --workdir alone."
    )
    self._processes = self.line.options(ProcessOptions)

  def parse(self) -> None:
    """Parse all flags.

    Raises:
      SystemExit: with status 0, after --help.
      MemoryVitError: for invalid flags.
    """
    self.config = self.line.parse(lambda: not self._report_only())
    self.workdir = Path(self._workdir()).expanduser()
    self.only = between_commas(self._only())
    self.dry_run, self.report_only = self._dry_run(), self._report_only()
    self.processes = self._processes()
    if self.report_only and (self.only or self.dry_run):
      raise mv.MemoryVitError(
        "--report_only reports everything that was measured: expected neither "
        "--only nor --dry_run."
      )


def between_commas(values: Sequence[str]) -> tuple[str, ...]:
  """Split the values of a flag that may be repeated at commas."""
  return tuple(part for value in values for part in value.split(",") if part)


def begin(study: StudyLine) -> None:
  """Show log lines, and join the other processes, before jax is used."""
  from memory_vit.runtime import join_processes

  absl_logging.set_verbosity(absl_logging.WARNING)
  log_package()
  join_processes(study.processes)


def report_again(study: StudyLine, write_report: Callable[[Path], None]) -> int:
  """Write and print the report, from its files alone; return 0.

  Raises:
    MemoryVitError: for files that are missing or damaged.
  """
  write_report(study.workdir)
  print(_report_in(study))
  return 0


def perform(
  study: StudyLine,
  forecast: Callable[[], str],
  train: "Callable[[StopSignal], None]",
) -> int:
  """Print the forecast or, after training, the report; return 0.

  SIGTERM and Ctrl-C make `train` save its state and raise `Interrupted`.
  """
  from memory_vit.runtime import StopSignal

  if study.dry_run:
    show(forecast())
    return 0
  stop = StopSignal()
  with stop.listening():
    train(stop)
  show(_report_in(study))
  return 0


def _report_in(study: StudyLine) -> str:
  return (study.workdir / "report.md").read_text(encoding="utf-8")


def typed(program: str, argv: Sequence[str]) -> str:
  """The command as it was typed, for a report."""
  return " ".join([program, *argv])


def show(text: str) -> None:
  """Print, by process 0."""
  import jax

  if jax.process_index() == 0:
    print(text)


def main(run: Callable[[Sequence[str]], int]) -> None:
  """Run a command, and end the process with its exit status."""
  # --report_only needs neither other processes nor jax.
  alone = any(
    a.lstrip("-").partition("=")[0] == "report_only" for a in sys.argv
  )
  with contextlib.nullcontext() if alone else leaving():
    sys.exit(run_command(lambda: run(sys.argv[1:])))

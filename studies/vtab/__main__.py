"""Measures VTAB-1k: 19 tasks, each learned from 1,000 images.

  python -m studies.vtab --dir=DATA --backbone=i21k-B/16 --workdir=DIR \\
    [--only=cifar,dtd,...] [--regimes=...] [--seeds=3] [--dry_run] \\
    [--config.KEY=VALUE ...]

DATA is the prepared folder of the benchmark, or holds its data sets as TFDS has
prepared them. DIR then holds report.md, report.json, the tasks, and in
runs/TASK/REGIME what `memory-vit train` leaves. Run the same command to
resume; what is finished is not repeated. A task without its data
is named and left out, and then the report has no means. --dry_run shows what
would run and about how long it takes, and writes nothing. See docs/vtab.md
of the repository.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from etils import epy

from memory_vit.commands import command_line, console
from memory_vit.config import MOST_TRIALS, Config
from memory_vit.errors import ConfigError
from memory_vit.runtime import launch, paths
from studies.vtab import layout, protocol, tasks
from studies.vtab.protocol import Benchmark
from studies.vtab.tasks import VtabTask

with epy.lazy_imports():  # once the command line is known to be right
  import jax

  from memory_vit.runtime import preemption
  from memory_vit.train import progress
  from studies.vtab import forecast, runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabArguments:
  """The command line, parsed; nothing was looked for on disk."""

  config: Config
  directory: Path
  workdir: Path
  tasks: tuple[VtabTask, ...]
  regimes: tuple[str, ...]
  seeds: tuple[int, ...]
  dry_run: bool
  processes: launch.Options

  def benchmark(self) -> Benchmark:
    """What is to be measured, with the data that are there.

    Raises:
      ConfigError: where there are none.
    """
    found, missing = layout.find(self.directory, self.tasks)
    return Benchmark(
      config=self.config,
      tasks=found,
      missing=missing,
      regimes=self.regimes,
      seeds=self.seeds,
      workdir=self.workdir,
    )


def main(argv: Sequence[str]) -> int:
  """Run the command; end the process where other processes take part."""
  arguments = console.parsed(lambda: parse(["python -m studies.vtab", *argv]))
  with launch.leaving():
    sys.exit(console.run_command(lambda: execute(arguments)))


def parse(argv: Sequence[str]) -> VtabArguments:
  """Read the command line, and run its configuration file.

  Raises:
    ConfigError: for what cannot be used.
  """
  line = command_line.CommandLine(__doc__, _with_config(argv))
  directory = line.required_string("dir", "Where the data of the tasks are.")
  workdir = line.required_string("workdir", "Where results are written.")
  backbone = line.string("backbone", "As --config.backbone.")
  only = line.strings("only", "Tasks, with commas between them; else all 19.")
  regimes = line.strings(
    "regimes",
    "How every task is learned, with commas between them; else "
    f"{','.join(protocol.REGIMES_COMPARED)}.",
  )
  seeds = line.string("seeds", "Final runs of each, so many; else 3.")
  dry_run = line.switch("dry_run", "Show what would run, train nothing.")
  processes = line.options(launch.Options)
  config = line.parse()
  if backbone_name := backbone():
    config = dataclasses.replace(config, backbone=backbone_name)
  named = _between_commas(regimes()) or protocol.REGIMES_COMPARED
  protocol.require_possible(config, named)
  return VtabArguments(
    config=config,
    directory=paths.local(directory(), "--dir"),
    workdir=paths.local(workdir(), "--workdir"),
    tasks=tasks.choose(_between_commas(only())),
    regimes=named,
    seeds=_seeds(seeds()),
    dry_run=dry_run(),
    processes=processes(),
  )


def _with_config(argv: Sequence[str]) -> list[str]:
  """The command line with the benchmark's configuration, if it names none."""
  name, *others = argv
  named = ("--config", "-config", "--config=", "-config=")
  if any(a in named[:2] or a.startswith(named[2:]) for a in others):
    return [*argv]
  return [name, "--config=vtab", *others]


def _between_commas(values: Sequence[str]) -> tuple[str, ...]:
  """Names, of flags that were given once or several times."""
  return tuple(name for value in values for name in value.split(",") if name)


def _seeds(text: str | None) -> tuple[int, ...]:
  """The seeds 0, 1, ..., of as many as were asked for.

  Raises:
    ConfigError: for what is no such number.
  """
  text = "3" if text is None else text
  digits = text.isascii() and text.isdigit() and len(text) <= 4
  count = int(text) if digits else 0
  if not 1 <= count <= MOST_TRIALS:
    raise ConfigError(
      f"--seeds={text!r}: expected how many there are, a number from 1 to "
      f"{MOST_TRIALS}."
    )
  return tuple(range(count))


def execute(arguments: VtabArguments) -> int:
  """Run the benchmark, or show what would run; return the exit status."""
  bench = arguments.benchmark()
  progress.log_to_stderr()
  launch.start(arguments.processes)
  if arguments.dry_run:
    text = forecast.forecast(bench)
    if jax.process_index() == 0:
      console.show(text)
    return 0
  stop = preemption.StopSignal()
  with stop.listening():
    runner.run_benchmark(bench, stop)
  if jax.process_index() == 0:
    report = bench.workdir / "report.md"
    console.show(report.read_text(encoding="utf-8"))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

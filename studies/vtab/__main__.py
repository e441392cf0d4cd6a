"""Measure VTAB-1k: 19 tasks, each learned from 1,000 images.

  python -m studies.vtab --dir=DATA --backbone=i21k-B/16 --workdir=DIR \\
    [--only=cifar,dtd,...] [--regimes=...] [--seeds=3] [--dry_run] \\
    [--config.KEY=VALUE ...]
  python -m studies.vtab --workdir=DIR --report_only

DATA is the prepared folder of the benchmark, or holds its data sets as TFDS has
prepared them. DIR then holds report.md, report.json, the tasks, and in
runs/TASK/REGIME the work directories of `memory-vit train`. The same command
resumes; finished runs are not repeated. A task without data is named and left
out, and then the report has no means. --dry_run lists the runs, estimates the
remaining time if some have finished, and writes nothing. See
docs/dev/studies.md.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import memory_vit as mv
from memory_vit.config import MOST_TRIALS
from studies import command
from studies.command import between_commas
from studies.vtab import layout, protocol, report, tasks
from studies.vtab.protocol import Benchmark


def parse(
  argv: Sequence[str],
) -> tuple[command.StudyLine, Callable[[], Benchmark]]:
  """Read the command line; the result's function looks for the data."""
  line = command.StudyLine(
    __doc__, argv, "Tasks, separated by commas; else all 19.", "vtab"
  )
  directory = line.line.string("dir", "Where the data of the tasks are.")
  backbone = line.line.string("backbone", "As --config.backbone.")
  regimes = line.line.strings(
    "regimes",
    "Regimes, separated by commas; else "
    f"{','.join(protocol.REGIMES_COMPARED)}.",
  )
  seeds = line.line.string("seeds", "Number of final runs of each; else 3.")
  line.parse()
  config = line.config
  if name := backbone():
    config = dataclasses.replace(config, backbone=name)
  named = between_commas(regimes()) or protocol.REGIMES_COMPARED
  protocol.require_possible(config, named)
  chosen, count = tasks.choose(line.only), _seeds(seeds())

  def benchmark() -> Benchmark:
    found, missing = layout.find(_directory(directory()), chosen)
    return Benchmark(
      config=config, tasks=found, missing=missing, regimes=named, seeds=count
    )

  return line, benchmark


def run(argv: Sequence[str]) -> int:
  line, benchmark = parse(argv)
  if line.report_only:
    return command.report_again(line, report.write_report)
  bench = benchmark()
  command.begin(line)
  from studies.vtab import runner  # it needs jax

  typed = command.typed("python -m studies.vtab", argv)
  return command.perform(
    line,
    lambda: runner.forecast(bench, line.workdir),
    lambda stop: runner.run_benchmark(
      bench, line.workdir, command=typed, stop=stop
    ),
  )


def _directory(text: str | None) -> Path:
  if text is None:
    raise mv.MemoryVitError(
      "--dir is missing: the folder with the data of the tasks."
    )
  return Path(text).expanduser()


def _seeds(text: str | None) -> tuple[int, ...]:
  text = "3" if text is None else text
  digits = text.isascii() and text.isdigit() and len(text) <= 4
  count = int(text) if digits else 0
  if not 1 <= count <= MOST_TRIALS:
    raise mv.MemoryVitError(
      f"--seeds={text!r}: expected their number, from 1 to {MOST_TRIALS}."
    )
  return tuple(range(count))


if __name__ == "__main__":
  command.main(run)

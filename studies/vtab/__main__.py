"""Measures VTAB-1k: 19 tasks, each learned from 1,000 images.

  python -m studies.vtab --dir=DATA --backbone=i21k-B/16 --workdir=DIR \\
    [--only=cifar,dtd,...] [--regimes=...] [--seeds=3] [--dry_run] \\
    [--config.KEY=VALUE ...]
  python -m studies.vtab --workdir=DIR --report_only

DATA is the prepared folder of the benchmark, or holds its data sets as TFDS has
prepared them. DIR then holds report.md, report.json, the tasks, and in
runs/TASK/REGIME what `memory-vit train` leaves. Run the same command to resume;
what is finished is not repeated. A task without its data is named and left out,
and then the report has no means. --dry_run shows what would run and, once runs
have finished, about how long the others take, and writes nothing. See
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
  """Read the command line; return what looks for the data, too.

  Raises:
    MemoryVitError: for what cannot be used.
  """
  line = command.StudyLine(
    __doc__, argv, "Tasks, with commas between them; else all 19.", "vtab"
  )
  directory = line.line.string("dir", "Where the data of the tasks are.")
  backbone = line.line.string("backbone", "As --config.backbone.")
  regimes = line.line.strings(
    "regimes",
    "How every task is learned, with commas between them; else "
    f"{','.join(protocol.REGIMES_COMPARED)}.",
  )
  seeds = line.line.string("seeds", "Final runs of each, so many; else 3.")
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
  """Run the benchmark, or show its plan or report; return 0.

  Raises:
    MemoryVitError: as `parse` and `run_benchmark`.
  """
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
      "--dir is missing: where the data of the tasks are."
    )
  return Path(text).expanduser()


def _seeds(text: str | None) -> tuple[int, ...]:
  """The seeds 0, 1, ..., of as many as were asked for.

  Raises:
    MemoryVitError: for what is no such number.
  """
  text = "3" if text is None else text
  digits = text.isascii() and text.isdigit() and len(text) <= 4
  count = int(text) if digits else 0
  if not 1 <= count <= MOST_TRIALS:
    raise mv.MemoryVitError(
      f"--seeds={text!r}: expected how many there are, a number from 1 to "
      f"{MOST_TRIALS}."
    )
  return tuple(range(count))


if __name__ == "__main__":
  command.main(run)

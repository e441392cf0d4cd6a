"""Measure the seconds to the first result, in fresh processes.

  python -m benchmarks.first_result --out=FILE [--only=ROW ...] [--rounds=3]
    [--checkout=DIR ...]

Each row of `first_result_rows` runs cold, with an empty home and no cache of
programs, and then warm, in a second process with the home and the cache of the
first. --checkout measures the package in another directory, such as an older
checkout; several take turns, so that one table compares them on one machine.

Seconds are those of a whole process, with its imports. FILE receives all
rounds, and the table of their medians is printed, with the ratios to the first
checkout in brackets.
"""

import argparse
import collections
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import first_result_rows
from memory_vit.runtime.tables import markdown_table

ROOT = Path(__file__).resolve().parent.parent
# What changes the cache of programs, or the imports.
_UNSET = (
  "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
  "MEMORY_VIT_COMPILE_CACHE", "MPLCONFIGDIR", "PYTHONDONTWRITEBYTECODE",
  "TF_USE_LEGACY_KERAS", "XDG_CACHE_HOME",
)  # fmt: skip
_STATES = ("cold", "warm")
# With the digits after the decimal point.
_DIGITS = {"seconds": 1, "cpu_seconds": 1, "compiled": 0, "modules": 0}
_COLUMNS = [(what, state) for what in _DIGITS for state in _STATES]
# {row: {checkout: its rounds, {"cold": what the process took, ...}}}.
Result = dict[str, dict[str, list[dict[str, Any]]]]


def main(argv: Sequence[str] | None = None) -> Result:
  """Measure, print a table, and write --out."""
  rows = {row.__name__: end for row, end in first_result_rows.ROWS.items()}
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.first_result",
    description=(__doc__ or "").split("\n")[0],
  )
  parser.add_argument("--out", required=True, type=Path)
  parser.add_argument("--only", action="append", choices=rows)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--checkout", action="append", type=Path)
  arguments = parser.parse_args(argv)
  result: Result = {}
  with contextlib.ExitStack() as stack:
    prepared = {
      checkout: _prepared(checkout, stack)
      for checkout in arguments.checkout or [ROOT]
    }
    for _ in range(arguments.rounds):
      for row in arguments.only or rows:
        of_row = result.setdefault(row, collections.defaultdict(list))
        for checkout, data in prepared.items():
          with tempfile.TemporaryDirectory() as home:
            found = {
              state: _process(checkout, home, row, data, rows[row])
              for state in _STATES
            }
          of_row[str(checkout)].append(found)
          arguments.out.write_text(json.dumps(result, indent=2))
  header = [f"{what}, {state}" for what, state in _COLUMNS]
  print(markdown_table(["", "checkout", *header], _medians(result)))
  return result


def _prepared(checkout: Path, stack: contextlib.ExitStack) -> Path:
  """A folder with what the rows read; the package is compiled to bytecode."""
  package = str(checkout / "memory_vit")
  subprocess.run([sys.executable, "-m", "compileall", "-q", package])
  home, data = (
    stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)
  )
  _process(checkout, home, "prepare", Path(data))
  return Path(data)


def _process(
  checkout: Path, home: str, what: str, data: Path, status: int = 0
) -> dict[str, Any]:
  """Run a process that must end with `status`; return what it took."""
  environment = {k: v for k, v in os.environ.items() if k not in _UNSET}
  environment |= {
    "HOME": home, "MEMORY_VIT_CACHE": f"{home}/cache",
    "PYTHONPATH": str(checkout.resolve()),
  }  # fmt: skip
  # -P: the folder of the script has modules with common names.
  command = [sys.executable, "-P", first_result_rows.__file__, what, str(data)]
  with tempfile.TemporaryDirectory() as cwd, tempfile.TemporaryFile() as log:
    began = time.perf_counter()
    process = subprocess.Popen(
      command, cwd=cwd, env=environment, stdout=log, stderr=log
    )
    _, ended, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    log.seek(0)
    said = log.read().decode()
  process.returncode = os.waitstatus_to_exitcode(ended)
  if process.returncode != status:
    raise RuntimeError(f"{what} ended with {process.returncode}:\n{said}")
  report = [line for line in said.splitlines() if line.startswith("{")][-1]
  cpu = used.ru_utime + used.ru_stime
  return {"seconds": seconds, "cpu_seconds": cpu, **json.loads(report)}


def _medians(result: Result) -> list[list[str]]:
  """The rows of the table."""
  rows = []
  for row, checkouts in result.items():
    first: dict[tuple[str, str], float] = {}
    for checkout, rounds in checkouts.items():
      cells = []
      for what, state in _COLUMNS:
        median = statistics.median(taken[state][what] for taken in rounds)
        before = first.get((what, state))
        ratio = f" ({median / before:.2f})" if before else ""
        cells.append(f"{median:,.{_DIGITS[what]}f}{ratio}")
        first.setdefault((what, state), median)
      rows.append([row, checkout, *cells])
  return rows


if __name__ == "__main__":
  main()

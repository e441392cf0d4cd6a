"""Compare heads in closed form with tasks that are trained, on the test bed.

  python -m benchmarks.closed_heads --data_dir=TFDS --backbone=FILE.npz
    [--data glyph_inverted ...] [--per_class 0 5] [--seeds=5] [--steps=500]
    [--workdir=DIR] [--pages FILE ...]

Trained rows choose their learning rate on validation, with each seed; a seed is
that of the task, and of the images if there are `per_class`. "from lda" begins
with the head of the row `lda`. Differences are from `head`, paired over the
seeds; their standard error is that of the mean over seeds.

Prints tables of accuracy and calibration, and writes them into the --pages that
have a place for them: docs/heads.md and docs/probabilities.md, which explain
them.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import memory_vit as mv
from memory_vit.run_result import TrialResult
from memory_vit.runtime.tables import markdown_table

# Learning rates of what is trained; the best on validation is taken.
_RATES = (0.1, 1.0)
CLOSED = ("lda", "ridge")
TRAINED = ("head", "cls_masked", "side_masked")
FROM_LDA = "side_masked, from lda"
DATA = ("glyph_inverted", "glyph_rotation", "glyph_new100")
# Row -> results of its best trial, one for each seed.
Rows = Mapping[str, Sequence[TrialResult]]


def main(argv: Sequence[str] | None = None) -> str:
  """Train and solve every row with every seed; returns the table."""
  arguments = _arguments(argv)
  found = {}
  with tempfile.TemporaryDirectory() as temporary:
    directory = arguments.workdir or Path(temporary)
    for data in arguments.data:
      for per_class in arguments.per_class:
        by_seed = [
          _trials(arguments, data, per_class, seed, directory)
          for seed in range(arguments.seeds)
        ]
        found[data, per_class] = {
          row: [trials[row] for trials in by_seed] for row in by_seed[0]
        }
        print(accuracy_table(found), flush=True)
  tables = accuracy_table(found), calibration_table(found)
  for page in arguments.pages:
    for name, text in zip(("accuracies", "calibration"), tables, strict=True):
      write_table(page, name, text)
  print("\n\n".join(tables))
  return "\n\n".join(tables)


def write_table(page: Path, name: str, table: str) -> None:
  """Replace a table of a page, if it has the two comments with its name."""
  begins, ends = f"<!-- {name} -->", f"<!-- end of {name} -->"
  before, found, rest = page.read_text(encoding="utf-8").partition(begins)
  if found:
    _, end, after = rest.partition(ends)
    if not end:
      raise SystemExit(f"{page} has no {ends}")
    text = f"{before}{begins}\n\n{table}\n\n{ends}{after}"
    page.write_text(text, encoding="utf-8")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.closed_heads",
    description=__doc__.split("\n")[0],
  )
  add = parser.add_argument
  add("--backbone", default="glyphs")
  add("--data", nargs="+", default=DATA, help="data sets of TFDS")
  add("--data_dir", default="", help="their directory, as data.dir")
  add("--per_class", type=int, nargs="+", default=(0, 5), help="training "
      "images of each class; 0 for all")  # fmt: skip
  add("--seeds", type=int, default=5)
  add("--steps", type=int, default=500)
  add("--workdir", type=Path, help="keeps the runs, which it finishes later")
  add("--pages", type=Path, nargs="+", default=(), help="pages with tables")
  return parser.parse_args(argv)


def _trials(
  arguments: argparse.Namespace,
  data: str,
  per_class: int,
  seed: int,
  directory: Path,
) -> dict[str, TrialResult]:
  """The best trial on validation of each row, with a seed."""
  base = mv.read_config(
    f"glyphs:{data}",
    {
      "backbone": arguments.backbone,
      "data.dir": arguments.data_dir,
      "data.per_class": per_class,
      "seed": seed,
      "log_images": 0,
      "export_orbax": False,
      "cache.dir": str(directory / "rows"),
    },
  )
  place = directory / f"{data}-{per_class}-{seed}"

  def run(name: str, **changes: object) -> mv.RunResult:
    options = {key.replace("__", "."): v for key, v in changes.items()}
    return mv.train_and_evaluate(base.replaced(options), place / name)

  solved = {
    name: run(
      name,
      regime="head",
      optim__name=name,
      total_steps=1,
      cache__what="features",
    )
    for name in CLOSED
  }
  steps = {
    "total_steps": arguments.steps,
    "eval_every": arguments.steps,
    "checkpoint_every": arguments.steps,
    "sweep__learning_rate": _RATES,
  }
  trained = run("trained", sweep__regime=TRAINED, **steps)
  init = place / CLOSED[0] / "tasks"
  [init] = init.iterdir()
  begun = run("begun", regime="side_masked", task__init=str(init), **steps)
  found = {name: result.tasks[0] for name, result in solved.items()}
  for name in TRAINED:  # the best on validation comes first
    found[name] = next(t for t in trained.tasks if t.regime == name)
  return {**found, FROM_LDA: begun.tasks[0]}


def accuracy_table(found: Mapping[tuple[str, int], Rows]) -> str:
  """A Markdown table of mean accuracies and differences from `head`."""

  def cell(row: str, rows: Rows) -> str:
    accuracies = _percents(rows[row], lambda t: t.test.score)
    shown = f"{statistics.mean(accuracies):.1f}"
    if row == "head":
      return shown
    base = _percents(rows["head"], lambda t: t.test.score)
    differences = [a - b for a, b in zip(accuracies, base, strict=True)]
    difference = statistics.mean(differences)
    return f"{shown} ({difference:+.1f} ± {standard_error(differences):.1f})"

  return _table("test accuracy, %", found, cell)


def calibration_table(found: Mapping[tuple[str, int], Rows]) -> str:
  """A Markdown table of expected calibration errors on test."""
  key = "calibration_error"

  def cell(row: str, rows: Rows) -> str:
    before = _percents(rows[row], lambda t: t.uncalibrated.get(key))
    after = _percents(rows[row], lambda t: t.test.metrics.get(key))
    error = standard_error(after)
    return (
      f"{statistics.mean(before):.1f} to {statistics.mean(after):.1f} "
      f"± {error:.1f}"
    )

  return _table("calibration error on test, %", found, cell)


def _table(
  title: str,
  found: Mapping[tuple[str, int], Rows],
  cell: Callable[[str, Rows], str],
) -> str:
  columns = [
    f"{data.removeprefix('glyph_')}, {per_class or 'all'}"
    for data, per_class in found
  ]
  rows = [
    (
      row if "," in row else f"`{row}`",
      *(cell(row, rows) for rows in found.values()),
    )
    for row in next(iter(found.values()))
  ]
  return markdown_table([title, *columns], rows)


def _percents(
  trials: Sequence[TrialResult],
  share_of: Callable[[TrialResult], float | None],
) -> list[float]:
  shares = [share_of(trial) for trial in trials]
  return [math.nan if share is None else 100 * share for share in shares]


def standard_error(values: Sequence[float]) -> float:
  """The standard error of a mean; NaN of a single value."""
  if len(values) < 2:
    return math.nan
  return statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
  main()

"""Compare heads in closed form with tasks that are trained, on the test bed.

  python -m benchmarks.closed_heads --data_dir=TFDS --backbone=FILE.npz
    [--data glyph_inverted ...] [--per_class 0 5] [--seeds=5] [--steps=500]
    [--workdir=DIR] [--page=FILE]

Trained rows choose their learning rate on validation, with each seed; a seed is
that of the task, and of the images if there are `per_class`. "from lda" begins
with the head of the row `lda`. Differences are from `head`, paired over the
seeds; their standard error is that of the mean over seeds.

Prints a table, and writes it into --page: docs/closed_heads.md, which explains
it.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import memory_vit as mv
from memory_vit.run_result import TrialResult
from memory_vit.runtime.tables import markdown_table

# Row -> changed options; several learning rates are tried.
_RATES = (0.03, 0.1, 0.3, 1.0)
CLOSED = ("lda", "ridge")
TRAINED = ("head", "cls_masked", "side_masked")
FROM_LDA = "side_masked, from lda"
DATA = ("glyph_inverted", "glyph_rotation", "glyph_new100")
# The table of a page is between these.
_BEGINS, _ENDS = "<!-- closed heads -->", "<!-- end of closed heads -->"

# Row -> test accuracies, one for each seed.
Row = Mapping[str, Sequence[float]]


def main(argv: Sequence[str] | None = None) -> str:
  """Train and solve every row with every seed; returns the table."""
  arguments = _arguments(argv)
  found = {}
  with tempfile.TemporaryDirectory() as temporary:
    directory = arguments.workdir or Path(temporary)
    for data in arguments.data:
      for per_class in arguments.per_class:
        by_seed = [
          _accuracies(arguments, data, per_class, seed, directory)
          for seed in range(arguments.seeds)
        ]
        found[data, per_class] = {
          row: [accuracies[row] for accuracies in by_seed] for row in by_seed[0]
        }
        print(table(found), flush=True)
  if arguments.page:
    before, rest = arguments.page.read_text(encoding="utf-8").split(_BEGINS)
    after = rest.split(_ENDS)[1]
    text = f"{before}{_BEGINS}\n\n{table(found)}\n\n{_ENDS}{after}"
    arguments.page.write_text(text, encoding="utf-8")
  return table(found)


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
  add("--page", type=Path, help="a page with the table")
  return parser.parse_args(argv)


def _accuracies(
  arguments: argparse.Namespace,
  data: str,
  per_class: int,
  seed: int,
  directory: Path,
) -> dict[str, float]:
  """The test accuracy of each row with a seed."""
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
  found = {name: _test(result.tasks[0]) for name, result in solved.items()}
  for name in TRAINED:  # the best on validation comes first
    found[name] = _test(next(t for t in trained.tasks if t.regime == name))
  return {**found, FROM_LDA: _test(begun.tasks[0])}


def _test(trial: TrialResult) -> float:
  accuracy = trial.test.accuracy
  assert accuracy is not None
  return 100 * accuracy


def table(found: Mapping[tuple[str, int], Row]) -> str:
  """A Markdown table of mean accuracies and differences from `head`."""
  rows = []
  for row in next(iter(found.values())):
    cells = []
    for accuracies in found.values():
      mean = statistics.mean(accuracies[row])
      differences = [
        a - b for a, b in zip(accuracies[row], accuracies["head"], strict=True)
      ]
      cell = f"{mean:.1f}"
      if row != "head":
        difference = statistics.mean(differences)
        cell += f" ({difference:+.1f} ± {_error(differences):.1f})"
      cells.append(cell)
    rows.append((f"`{row}`" if "," not in row else row, *cells))
  columns = [
    f"{data.removeprefix('glyph_')}, {per_class or 'all'}"
    for data, per_class in found
  ]
  return markdown_table(["test accuracy, %", *columns], rows)


def _error(values: Sequence[float]) -> float:
  """The standard error of the mean."""
  if len(values) < 2:
    return math.nan
  return statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
  main()

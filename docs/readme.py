"""Write the table of README.md from the files of the benchmarks.

python -m docs.readme
"""

import json
import re
from pathlib import Path
from typing import Any

from memory_vit.runtime.tables import markdown_table

_ROOT = Path(__file__).resolve().parents[1]
PAGE = _ROOT / "README.md"
_BEGINS, _ENDS = "<!-- measured -->", "<!-- end of measured -->"
_COSTS = _ROOT / "docs" / "results" / "comparison" / "comparison.json"
_ACCURACIES = _ROOT / "docs" / "reference" / "comparison.md"
_REPRODUCTION = "https://github.com/necrashter/transformers-learnable-memory"

# Header, index of the library in the file of costs, what its ratios are called
# there, and the row in the table of accuracies.
_COLUMNS = (
  ("memory cells", 0, ("train", "train_kept", "infer_1", "infer_16"),
   "`memory_masked`"),
  ("side stream", 0,
   ("train_side", "train_side_kept", "infer_side_1", "infer_side_16"),
   "`side_masked`"),
  ("LoRA (PEFT)", 1, ("train", "train_kept", "infer_1", "infer_16"),
   "LoRA of rank 8, PEFT"),
  ("this paper in vit-pytorch", 2,
   ("train", "train_kept", "infer_1", "infer_16"), None),
  (f"this paper in [PyTorch]({_REPRODUCTION})", 3,
   ("train", "train_kept", "infer_1", "infer_16"), None),
)  # fmt: skip
_ROWS = (
  "a training step of one task",
  "the same on cached keys and values",
  "inference: original outputs and 1 task",
  "inference: original outputs and 16 tasks",
  "change of the original outputs",
  "test accuracy on the task of `make quickstart`",
)


def with_table(page: str) -> str:
  """Replace the lines between the markers of a page."""
  before, _, rest = page.partition(_BEGINS)
  _, _, after = rest.partition(_ENDS)
  return f"{before}{_BEGINS}\n\n{table()}\n\n{_ENDS}{after}"


def table() -> str:
  """Render costs, from their JSON, and accuracies, from their table."""
  libraries = json.loads(_COSTS.read_text("utf-8"))["libraries"]
  accuracies = _ACCURACIES.read_text("utf-8")
  columns = [
    [
      *(_ratio(libraries[i], key) for key in keys),
      _change(libraries[i]),
      _accuracy(accuracies, row),
    ]
    for _, i, keys, row in _COLUMNS
  ]
  header = ("cost in forward passes", *(name for name, *_ in _COLUMNS))
  return markdown_table(header, list(zip(_ROWS, *columns, strict=True)))


def _ratio(library: dict[str, Any], key: str) -> str:
  """The median of the processes; a library may not offer what is measured."""
  ratio = library["ratios"].get(key)
  return f"{ratio[1]:.2f}" if ratio else "not offered"


def _change(library: dict[str, Any]) -> str:
  change = library["original_difference"]
  return f"up to {change:.0e}" if change else "none (bitwise)"


def _accuracy(page: str, row: str | None) -> str:
  if row is None:
    return "not measured"
  cells = re.search(
    rf"^\| {re.escape(row)} \| [\d,]+ \| ([\d.]+ %)", page, re.M
  )
  if cells is None:
    raise ValueError(f"{_ACCURACIES}: expected a row {row!r}")
  return cells[1]


if __name__ == "__main__":
  PAGE.write_text(with_table(PAGE.read_text("utf-8")), encoding="utf-8")
  print(PAGE)

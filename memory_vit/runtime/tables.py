"""Write tables: aligned text, Markdown, CSV."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.runtime.messages import escaped

# First characters of spreadsheet formulas; a formula may run commands. The last
# four are full-width forms, which some spreadsheets treat like the first four.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
  """Align columns of text: the first to the left, all others to the right."""
  lines = [header, *rows]
  widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

  def aligned(line: tuple[str, ...]) -> str:
    first, *rest = line
    cells = [first.ljust(widths[0])]
    cells += [c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)]
    return "  ".join(cells).rstrip()

  rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
  return "\n".join([aligned(header), rule, *map(aligned, rows)])


def aligned(rows: Sequence[tuple[str, str]]) -> str:
  """Align two columns of text, both to the left."""
  width = max(len(first) for first, _ in rows)
  return "\n".join(f"{a.ljust(width)}  {b}".rstrip() for a, b in rows)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Return a Markdown table; escape "|" and join the lines of a cell."""

  def row(cells: Sequence[str]) -> str:
    shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(shown)} |"

  return "\n".join([row(header), "|---" * len(header) + "|", *map(row, rows)])


def write_csv(path: Path, columns: Mapping[str, Any]) -> None:
  """Write columns in UTF-8, with text in quotes and null as an empty cell.

  Lists hold text, which `csv_cell` escapes; arrays hold numbers or bools.
  """
  import pyarrow as pa
  from pyarrow import csv

  arrays = [
    pa.array([cell and csv_cell(cell) for cell in values], pa.string())
    if isinstance(values, list)
    else values
    for values in columns.values()
  ]
  csv.write_csv(pa.table(arrays, names=list(columns)), path)


def csv_cell(text: str) -> str:
  """Return text on one line that no spreadsheet takes for a formula.

  Text that begins like a formula gets an apostrophe in front.
  """
  shown = escaped(text)
  return f"'{shown}" if shown.startswith(_FORMULA) else shown

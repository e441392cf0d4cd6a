"""Columns of text."""

from collections.abc import Sequence


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
  """Aligned columns of text, the first to the left and the others right."""
  lines = [header, *rows]
  widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

  def aligned(line: tuple[str, ...]) -> str:
    first, *others = line
    cells = [first.ljust(widths[0])]
    cells += [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
    return "  ".join(cells).rstrip()

  rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
  return "\n".join([aligned(header), rule, *map(aligned, rows)])


def aligned(rows: Sequence[tuple[str, str]]) -> str:
  """Two columns of text, both to the left."""
  width = max(len(first) for first, _ in rows)
  return "\n".join(f"{a.ljust(width)}  {b}".rstrip() for a, b in rows)

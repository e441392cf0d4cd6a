"""Names of classes and files, as they are stored: they are strangers' text."""

from __future__ import annotations

from memory_vit.runtime.messages import escaped

# What begins a formula in a spreadsheet, which may run commands; the last four
# are full-width forms, that some take for the same.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def csv_cell(text: str) -> str:
  """Text of one line that no spreadsheet takes for a formula.

  One that begins as a formula does gets an apostrophe in front.
  """
  shown = escaped(text)
  return f"'{shown}" if shown.startswith(_FORMULA) else shown

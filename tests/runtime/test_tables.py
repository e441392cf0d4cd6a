"""Tables in which no name breaks a row or a column."""

import csv

import numpy as np

from memory_vit.runtime import tables


def test_no_cell_of_markdown_ends_its_column_or_its_row():
  shown = tables.markdown_table(("a", "b|c"), [("x|y", "1\n2"), ("", "3")])
  assert shown.split("\n") == [
    "| a | b\\|c |", "|---|---|", "| x\\|y | 1 2 |", "|  | 3 |",
  ]  # fmt: skip


def test_csv_has_text_in_quotes_and_nothing_for_null(tmp_path):
  file = tmp_path / "a.csv"
  names = ['a,"b"', None, "=1", "é\n"]
  tables.write_csv(file, {"name": names, "value": np.arange(4)})
  rows = file.read_bytes().decode("utf-8").split("\n")
  assert rows[:3] == ['"name","value"', '"a,""b""",0', ",1"]
  with file.open(encoding="utf-8", newline="") as opened:
    found = [row["name"] for row in csv.DictReader(opened)]
  assert found == ['a,"b"', "", "'=1", "é\\n"]

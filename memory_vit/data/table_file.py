"""CSV and Parquet tables of images: paths and labels in columns.

A CSV is read as Excel, pandas and R write it: UTF-8 or UTF-16, with commas,
semicolons, tabs or bars between cells. Every cell is text: "007" is a name.
"""

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memory_vit.errors import BrokenDataError, DataError
from memory_vit.kinds import Kind
from memory_vit.kinds.written import name_of
from memory_vit.runtime import messages, parquet

SUFFIXES = (".csv", ".tsv", ".parquet")
_PATH, _LABEL = "path", "label"
_DELIMITERS = ",;\t|"
# Start of a line such as "sep=;", which Excel writes before the header.
_SEPARATOR = "sep="
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Number of rows of a Parquet file that are decoded at once.
_AT_ONCE = 2**16


def path_column(path: str) -> str:
  """Return the column of paths that `config.data.path` names."""
  return path.strip() or _PATH


def label_columns(label: str, kind: Kind, path: str) -> list[str]:
  """List the columns in `config.data.label`; `path` is the column of paths."""
  columns = [name.strip() for name in label.split(",")] if label else [_LABEL]
  if len(columns) > 1 and kind.one_is_right:
    raise DataError(
      f"config.data.label is {messages.brief(label)}, which names several "
      "columns: expected one column of classes, or config.task.kind 'labels' "
      "or 'values'."
    )
  if len({path, *columns}) <= len(columns):
    raise DataError(
      f"config.data.label is {messages.brief(label)}, and the paths are in the "
      f"column {messages.brief(path)}: expected different columns."
    )
  return columns


def is_table(path: Path, column: str) -> bool:
  """Return whether a file is a table, by its suffix or by its first line."""
  if path.suffix.lower() in SUFFIXES:
    return True
  with path.open("rb") as file:
    first = file.readline(2**16)
  header = first.decode("utf-8-sig", "replace").strip().split("\t")
  return first.startswith(_UTF_16) or (len(header) > 1 and column in header)


def rows(
  path: Path, columns: Sequence[str], most: int
) -> Iterator[tuple[int, tuple[Any, ...]]]:
  """Yield (number, cells of the columns) of each row that is not blank.

  A Parquet file of more than `most` rows is refused before it is read.
  """
  if path.suffix.lower() == ".parquet":
    yield from enumerate(_rows_of_parquet(path, columns, most), 1)
    return
  table = enumerate(_rows_of_csv(path))
  _, header = next(table, (0, list[str]()))
  places = [header.index(name) for name in _found(path, columns, header)]
  for number, row in table:
    if any(map(str.strip, row[len(header) :])):
      raise BrokenDataError(
        f"{_shown(path)}, row {number} has {len(row)} cells, but the header "
        f"has {len(header)}. Text with a separator must be in quotes, such as "
        '"1,5".'
      )
    if any(map(str.strip, row)):
      yield number, tuple(row[i] if i < len(row) else "" for i in places)


def _rows_of_parquet(
  path: Path, columns: Sequence[str], most: int
) -> Iterator[tuple[Any, ...]]:
  with parquet.reading(path) as file:
    count = file.metadata.num_rows
    if count > most:
      raise BrokenDataError(
        f"{_shown(path)} has {count:,} rows, expected at most {most:,}."
      )
    names = _found(path, columns, file.schema_arrow.names)
    for batch in file.iter_batches(_AT_ONCE, columns=names):
      batch.validate(full=True)  # refuse text that is not UTF-8
      yield from zip(*(batch[n].to_pylist() for n in names), strict=True)


def _rows_of_csv(path: Path) -> Iterator[list[str]]:
  with path.open("rb") as file:
    encoding = "utf-16" if file.read(2) in _UTF_16 else "utf-8-sig"
  try:
    with path.open(encoding=encoding, newline="") as lines:
      first = lines.readline()
      if first.strip('"').startswith(_SEPARATOR):
        delimiter = first.strip('"\r\n').removeprefix(_SEPARATOR)[:1] or ","
        first = lines.readline()
      else:
        delimiter = _delimiter(first)
      every = itertools.chain([first], lines)
      yield from csv.reader(every, delimiter=delimiter, strict=True)
  except UnicodeDecodeError as error:
    raise BrokenDataError(
      f"{_shown(path)} is not {error.encoding.upper()} (byte "
      f"{error.object[error.start]:#x}): save it as UTF-8 (in Excel as 'CSV "
      "UTF-8')."
    ) from None
  except (OSError, csv.Error) as error:
    raise BrokenDataError(
      f"{_shown(path)} cannot be read: {messages.first_line(error)}."
    ) from None


def _delimiter(header: str) -> str:
  return max(_DELIMITERS, key=header.count)


def _found(
  path: Path, columns: Sequence[str], header: Sequence[str]
) -> list[str]:
  """Return the names of `columns`, each spelled as in the header."""
  names = []
  for name in columns:
    same = _same(name, header)
    if len(same) != 1:
      shown = [messages.brief(column) for column in header]
      raise DataError(
        f"{_shown(path)} has {len(same)} columns {messages.brief(name)}, "
        f"expected one. The file has the columns {messages.name_list(shown)}; "
        "config.data.path names the column of paths "
        f"(by default {_PATH!r}), and config.data.label names the columns of "
        f"labels (by default {_LABEL!r}). If this file is no list of images, "
        "move it elsewhere: if a folder has neither classes.txt nor a list "
        "'train', every table in the folder is read as a list of images."
      )
    names += same
  return names


def _same(name: str, header: Sequence[str]) -> list[str]:
  """Return the columns called `name`.

  If there are none, return the columns whose names differ from `name` only in
  upper and lower case.
  """
  known = {i: name_of(column) for i, column in enumerate(header)}
  places = [i for i in known if known[i] == name] or [
    i for i in known if known[i].casefold() == name.casefold()
  ]
  return [header[i] for i in places]


def _shown(path: Path) -> str:
  return messages.utf8(str(path))

"""CSV and Parquet tables of images: paths and labels in columns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

from memory_vit.data import labels
from memory_vit.data.labels import Label
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime import messages, parquet

SUFFIXES = (".csv", ".parquet")
_PATH, _LABEL = "path", "label"


class Table(NamedTuple):
  """The rows of a table.

  Attributes:
    paths: of images, whatever the column holds.
    labels: of the same images.
    names: of several columns, or of values in one; else empty.
  """

  paths: list[Any]
  labels: list[Label]
  names: tuple[str, ...]


def read_table(path: Path, kind: str, label: str) -> Table:
  """Read a table; `label` has the names of columns, separated by commas."""
  columns = [name.strip() for name in label.split(",")] if label else [_LABEL]
  if len(columns) > 1 and kind == "classes":
    raise DataError(
      f"config.data.label is {messages.brief(label)}, of several columns: "
      "expected one column of classes, or config.task.kind 'labels' or "
      "'values'."
    )
  try:
    found = _read(path, [_PATH, *columns])
  except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
    raise BrokenDataError(
      f"{_shown(path)} cannot be read: {messages.first_line(error)}."
    ) from error
  paths, *cells = (found[name].to_pylist() for name in [_PATH, *columns])
  several = len(columns) > 1
  rows = zip(*cells, strict=True) if several else cells[0]
  read = []
  for number, row in enumerate(rows, 1):
    try:
      # Several columns of labels are 1 and 0 for each.
      read.append(labels.read(row, "values" if several else kind))
    except DataError as error:
      raise BrokenDataError(f"{_shown(path)}, row {number}: {error}.") from None
  is_value = kind == "values" and all(np.size(row) == 1 for row in read)
  return Table(paths, read, tuple(columns) if several or is_value else ())


def _read(path: Path, columns: Sequence[str]) -> pa.Table:
  if path.suffix == ".parquet":
    with parquet.reading(path) as file:
      _require(path, columns, file.schema_arrow.names)
      found = file.read(columns=list(columns))
      found.validate(full=True)  # text may be no UTF-8
      return found
  with csv.open_csv(path) as reader:
    _require(path, columns, reader.schema.names)
  # As text: "007" is the name of a class.
  as_text = csv.ConvertOptions(
    include_columns=columns, column_types=dict.fromkeys(columns, pa.string())
  )
  return csv.read_csv(path, convert_options=as_text)


def _require(path: Path, columns: Sequence[str], found: Sequence[str]) -> None:
  for name in columns:
    if found.count(name) != 1:
      raise DataError(
        f"{_shown(path)} has {found.count(name)} columns {messages.brief(name)}"
        f", expected one: 'path' and config.data.label "
        f"({_LABEL!r} if it is '') name columns of the table, which are "
        f"{messages.name_list([messages.brief(each) for each in found])}."
      )


def _shown(path: Path) -> str:
  return messages.utf8(str(path))

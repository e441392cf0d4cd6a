"""CSV and Parquet tables of images: paths and labels in columns."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime import messages, parquet

SUFFIXES = (".csv", ".parquet")
_PATH, _LABEL = "path", "label"


def label_columns(label: str, kind: str) -> list[str]:
  """The columns that `config.data.label` names."""
  columns = [name.strip() for name in label.split(",")] if label else [_LABEL]
  if len(columns) > 1 and kind == "classes":
    raise DataError(
      f"config.data.label is {messages.brief(label)}, of several columns: "
      "expected one column of classes, or config.task.kind 'labels' or "
      "'values'."
    )
  return columns


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, Any]]:
  """The path and the label in each row; of several columns a tuple."""
  try:
    table = _read(path, [_PATH, *columns])
  except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
    raise BrokenDataError(
      f"{_shown(path)} cannot be read: {messages.first_line(error)}."
    ) from error
  paths, *cells = (table[name].to_pylist() for name in [_PATH, *columns])
  found = zip(*cells, strict=True) if len(columns) > 1 else cells[0]
  return zip(paths, found, strict=True)


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
        f", expected one. Its columns are "
        f"{messages.name_list([messages.brief(each) for each in found])}; "
        f"{_PATH!r} holds the paths, and config.data.label names the columns "
        f"of the labels ({_LABEL!r} if it is ''). (Without a classes.txt, every"
        " table of the folder has to be a list.)"
      )


def _shown(path: Path) -> str:
  return messages.utf8(str(path))

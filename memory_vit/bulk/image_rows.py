"""Read the images of an inventory by their numbers, still encoded."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memory_vit.bulk import readers
from memory_vit.bulk.input_files import InputFiles
from memory_vit.bulk.readers import Columns, ImageRow
from memory_vit.errors import DataError


def read_rows(
  inventory: InputFiles, numbers: range, columns: Columns
) -> Iterator[ImageRow]:
  """Read images one after the other.

  Image files are named, not opened: whoever decodes them does that.

  Args:
    inventory: of the input.
    numbers: of images, without gaps.
    columns: of Parquet files.

  Raises:
    DataError: where a file of many images has changed, or cannot be read.
  """
  first = inventory.first
  # Files without images are never the last that begins at or before a number.
  file = int(np.searchsorted(first, numbers.start, side="right")) - 1
  while file < inventory.files.num_rows and first[file] < numbers.stop:
    begin, end = int(first[file]), int(first[file + 1])
    inside = range(max(begin, numbers.start), min(end, numbers.stop))
    if inside:
      row = inventory.files.slice(file, 1).to_pylist()[0]
      name = os.fsdecode(row["path"])
      if readers.is_container(Path(name)):
        rows = range(inside.start - begin, inside.stop - begin)
        yield from _of_container(Path(name), rows, begin, columns)
      else:
        shown = row["path"].decode("utf-8", "backslashreplace")
        image = None if row["reason"] else name
        yield ImageRow(begin, shown, image, row["label"], row["reason"])
    file += 1


def _of_container(
  path: Path, rows: range, first: int, columns: Columns
) -> Iterator[ImageRow]:
  try:
    yield from readers.read_container(path, rows, first, columns)
  except ValueError as error:  # of zip: it has other rows than it had
    if isinstance(error, DataError):
      raise
    raise DataError(f"{path} has changed while it was read: {error}") from error


def batches_of(rows: Iterator[ImageRow], size: int) -> Iterator[list[ImageRow]]:
  """Rows, `size` at a time, fewer at the end."""
  while batch := list(itertools.islice(rows, size)):
    yield batch

"""Rows of embeddings that stand for the images of a split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from memory_vit.data.embedding_files import EmbeddingFiles, Origin, shown
from memory_vit.errors import DataError
from memory_vit.runtime import parquet
from memory_vit.runtime.messages import brief

# Rows that are decoded together.
_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True, eq=False)  # it holds an array
class EmbeddedRows:
  """Which rows of which files are the examples of a split, in its order.

  Attributes:
    files: (path, rows in it) of each; nothing of them is in memory.
    origin: how all of them were made.
    rows: int64 (k,), of every example, counted over the files.
  """

  files: tuple[tuple[Path, int], ...]
  origin: Origin
  rows: np.ndarray

  @classmethod
  def of(
    cls, parts: Sequence[tuple[EmbeddingFiles, np.ndarray]]
  ) -> EmbeddedRows:
    """Rows, int64 (k,), of each of some outputs of `embed`.

    Raises:
      DataError: where these were made in different ways.
    """
    first, start = parts[0][0], 0
    files: list[tuple[Path, int]] = []
    rows = []
    for output, numbers in parts:
      if output.origin != first.origin:
        raise DataError(
          f"{shown(first.paths[0])} and {shown(output.paths[0])} were made in "
          f"different ways: {brief(first.origin)} and {brief(output.origin)}."
        )
      files += zip(output.paths, output.counts, strict=True)
      rows.append(numbers + start)
      start += sum(output.counts)
    return cls(tuple(files), first.origin, np.concatenate(rows))

  def take(self, indices: np.ndarray) -> EmbeddedRows:
    """The rows of some examples, int64 (n,)."""
    return dataclasses.replace(self, rows=self.rows[indices])

  def values(self, name: str) -> Iterator[np.ndarray]:
    """Read the rows, which have to be in the order of the files.

    Args:
      name: of the column, "pooled" or "layers".

    Yields:
      The values of each row, (...), as they are stored.

    Raises:
      DataError: where a file is damaged, or a row has no values.
    """
    begin = 0
    for path, count in self.files:
      first, last = np.searchsorted(self.rows, [begin, begin + count])
      if first < last:
        yield from self._values_of(path, name, self.rows[first:last] - begin)
      begin += count

  def _values_of(
    self, path: Path, name: str, rows: np.ndarray
  ) -> Iterator[np.ndarray]:
    """`values` of one file."""
    begin = 0
    with parquet.reading(path) as file:
      for batch in file.iter_batches(_AT_ONCE, columns=[name]):
        end = begin + batch.num_rows
        first, last = np.searchsorted(rows, [begin, end])
        if first < last:
          found = batch.column(0).take(pa.array(rows[first:last] - begin))
          yield from self._array(found, path, name)
        begin = end

  def _array(self, column: pa.Array, path: Path, name: str) -> np.ndarray:
    """A column of bytes as an array (k, ...)."""
    if column.null_count:
      raise DataError(
        f"{shown(path)}: {column.null_count} rows have no {name!r}, though "
        "their images could be read: embed them anew."
      )
    shape = (len(column), *self.origin.shapes[name])
    values = np.frombuffer(
      column.buffers()[1], self.origin.kind, math.prod(shape)
    )
    return values.reshape(shape)

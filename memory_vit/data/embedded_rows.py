"""Rows of embeddings that stand for the images of a split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from memory_vit.data.embedding_files import EmbeddingFiles, Origin


@dataclasses.dataclass(frozen=True, eq=False)  # it holds an array
class EmbeddedRows:
  """Which rows of which files are the examples of a split, in its order.

  Attributes:
    files: of the embeddings; nothing of them is in memory.
    rows: int64 (k,), of every example.
  """

  files: EmbeddingFiles
  rows: np.ndarray

  @property
  def origin(self) -> Origin:
    """How they were made."""
    return self.files.origin

  def take(self, indices: np.ndarray) -> EmbeddedRows:
    """The rows of some examples, int64 (n,)."""
    return dataclasses.replace(self, rows=self.rows[indices])

  def batches(self, name: str, size: int) -> Iterator[np.ndarray]:
    """Read all rows, which have to be in the order of the files.

    Args:
      name: of the column, "pooled" or "layers".
      size: b.

    Yields:
      Arrays (b, ...) as they are stored; the last one may have fewer rows.
    """
    shape = (size, *self.origin.shapes[name])
    batch, filled = np.empty(shape, self.origin.kind), 0
    for values in self.files.values(name, self.rows):
      while len(values):
        part = values[: size - filled]
        batch[filled : filled + len(part)] = part
        filled, values = filled + len(part), values[len(part) :]
        if filled == size:
          yield batch
          batch, filled = np.empty(shape, self.origin.kind), 0
    if filled:
      yield batch[:filled]

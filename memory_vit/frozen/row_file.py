"""Cached rows in a file on disk, each with a checksum.

A header for every row comes first, then the rows: all leaves of an image side
by side. A row that is not there is a hole. Nothing is mapped into memory, where
a full disk or a file that is cut would be a signal (SIGBUS) and no error.
"""

import logging
import os
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.errors import TrainingError
from memory_vit.frozen.layout import RowLayout
from memory_vit.frozen.rows import Batch, put_labels, to_host
from memory_vit.runtime import files, processes, sharding

logger = logging.getLogger(__name__)

# "row" is the CRC32 of a row, "header" that of the fields before it. A hole has
# no header: the CRC32 of zeros is another number.
_HEADER = np.dtype(
  [("row", "<u4"), ("label", "<i4"), ("mask", "<f4"), ("header", "<u4")]
)


class FileRows:
  """Rows in a file; see `rows.Rows`.

  The checksum of a row is compared once in a run: when the row is first read.
  Several processes compare those of all rows when they open their files, since
  a row can only be made again by all of them together.

  Attributes:
    path: of the file.
    labels: int32 (n,).
    masks: float32 (n,).
  """

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range, path: Path
  ) -> None:
    """Read the headers; nothing is written before `open`.

    Args:
      layout: of a row.
      count: n.
      mesh: over which a batch is split.
      places: at which the batches of this process start.
      path: of the file, which need not exist.
    """
    self._layout, self._mesh, self._places = layout, mesh, places
    self.path = path
    self._headers = _read_headers(path, count)
    self.labels, self.masks = self._headers["label"], self._headers["mask"]
    self._exists = self._headers["header"] == _sums(self._headers)
    self._checked = np.zeros(count, bool)

  def open(self, fill: Callable[[list[range]], None]) -> None:
    """Open the file, or make it, to put and take rows.

    Args:
      fill: puts the rows of some spans, which are damaged.

    Raises:
      TrainingError: if it cannot be written.
    """
    self._fill = fill
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with files.writing(self.path):
      self._file = os.open(self.path, flags, 0o666)
      weakref.finalize(self, os.close, self._file)
      os.ftruncate(self._file, self._offset(len(self.labels)))
    words = self._headers.view("<u4").reshape(-1, 4)
    damaged = int((words.any(axis=1) & ~self._exists).sum())
    if jax.process_count() > 1:
      damaged += self._check()
    self._warn(damaged)

  def unreadable(self) -> np.ndarray:
    """Places, int64 (k,), of rows whose own image could not be read."""
    return np.flatnonzero(self._exists & (self.masks == 0))

  def missing(self) -> list[range]:
    """Places without a row on some process, as whole batches; all must call."""
    step = self._places.step
    absent = np.unique(np.flatnonzero(~self._exists) // step)
    spans: list[range] = []
    for i in processes.union_over_processes(absent.tolist()):
      first = i * step
      if spans and spans[-1].stop == first:
        first = spans.pop().start
      spans.append(range(first, (i + 1) * step, step))
    return spans

  def put(self, start: int, inputs: Any, batch: Batch) -> None:
    """See `Rows`; the headers follow the rows, and make them exist."""
    leaves = to_host(self._layout.narrow(inputs), self._mesh)
    count = put_labels(self, start, batch)
    rows = np.concatenate([*map(_bytes_of, leaves)], axis=1)[:count]
    part = slice(start, start + count)
    headers = self._headers[part]
    headers["row"] = [zlib.crc32(row) for row in rows]
    headers["header"] = _sums(headers)
    with files.writing(self.path):
      self._write(rows, self._offset(start))
      self._write(headers, start * _HEADER.itemsize)
    self._exists[part], self._checked[part] = True, False

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`; damaged rows are made again, if this process is alone.

    Raises:
      TrainingError: if the file does not hold what was written to it.
    """
    leaves = self._layout.empty(len(places))
    whole = self._read(places, leaves)
    if not whole and jax.process_count() == 1:
      self._warn(self._check())
      self._fill(self.missing())
      whole = self._read(places, leaves)
    if not whole:
      raise TrainingError(
        f"{self.path} does not hold what was written to it (CRC32). Give the "
        "same command again, which makes damaged rows again; if that does not "
        "help, the disk is failing: give another config.keep.dir."
      )
    batch = jax.tree.unflatten(self._layout.treedef, leaves)
    return self._layout.widen(sharding.shard_batch(batch, self._mesh))

  def _check(self) -> int:
    """Read all rows; count, and forget, those that are damaged."""
    self._checked[:] = False
    leaves = self._layout.empty(1)
    damaged = [
      place
      for place in np.flatnonzero(self._exists)
      if not self._read(np.array([place]), leaves)
    ]
    self._exists[damaged] = False
    return len(damaged)

  def _warn(self, damaged: int) -> None:
    if damaged:
      logger.warning(
        "%s: damaged rows: %d. They are made again.", self.path, damaged
      )

  def _read(self, places: np.ndarray, leaves: list[np.ndarray]) -> bool:
    """Read rows into their leaves (b, ...); False if one is damaged."""
    parts = [*map(_bytes_of, leaves)]
    return all(
      self._read_row(place, [part[i].data for part in parts])
      for i, place in enumerate(places)
    )

  def _read_row(self, place: int, parts: list[memoryview]) -> bool:
    try:
      count = os.preadv(self._file, parts, self._offset(place))
    except OSError:  # a sector that cannot be read
      return False
    if count < self._layout.nbytes:
      return False
    if not self._checked[place]:
      found = 0
      for part in parts:
        found = zlib.crc32(part, found)
      self._checked[place] = found == self._headers["row"][place]
    return bool(self._checked[place])

  def _offset(self, place: int) -> int:
    """Where a row begins in the file."""
    return self._headers.nbytes + int(place) * self._layout.nbytes

  def _write(self, values: np.ndarray, offset: int) -> None:
    left = values.view(np.uint8).reshape(-1).data
    while left:  # a call writes 2 GiB at most
      written = os.pwrite(self._file, left, offset)
      left, offset = left[written:], offset + written


def _read_headers(path: Path, count: int) -> np.ndarray:
  """The headers (n,) as they are in a file; zeros behind its end."""
  headers = np.zeros(count, _HEADER)
  if path.is_file():
    with path.open("rb") as file:
      file.readinto(headers.view(np.uint8).data)
  return headers


def _sums(headers: np.ndarray) -> np.ndarray:
  """The CRC32 of the first fields of headers, uint32 (n,)."""
  fields = headers.view(np.uint8).reshape(-1, _HEADER.itemsize)[:, :-4]
  sums = [zlib.crc32(field) for field in np.ascontiguousarray(fields)]
  return np.array(sums, np.uint32)


def _bytes_of(leaf: np.ndarray) -> np.ndarray:
  """An array (b, ...) -> uint8 (b, m), a view if that is possible."""
  rows = np.ascontiguousarray(leaf).reshape(len(leaf), -1)
  return rows.view(np.uint8)

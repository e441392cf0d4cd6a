"""Cached rows in a file on disk, each with a checksum.

All headers come first, then all rows, each with the bytes of all its leaves; a
missing row is a hole. The file is not memory-mapped, because a full disk or a
truncated file would then raise SIGBUS instead of an error.
"""

import contextlib
import logging
import math
import os
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.cache.rows import RowLayout, Rows
from memory_vit.errors import TrainingError
from memory_vit.runtime import files, processes

logger = logging.getLogger(__name__)


def _header_of(label: np.dtype) -> np.dtype:
  """Return the dtype of the header of a row.

  A header has the CRC32 of the row ("row"), the label, the mask, and the CRC32
  of these three fields ("header"). A header that was never written reads as
  zeros, and is not valid, because the CRC32 of zeros is not zero.
  """
  return np.dtype(
    [("row", "<u4"), ("label", label), ("mask", "<f4"), ("header", "<u4")]
  )


class FileRows(Rows):
  """Rows in a file, whose checksums are verified once in a run.

  A single process verifies a row when the row is first read. Several processes
  must recompute rows together, so they verify all rows when opening the files.
  """

  def __init__(
    self, layout: RowLayout, count: int, mesh: Mesh, places: range, path: Path
  ) -> None:
    """Read the headers of all rows, if the file `path` exists."""
    super().__init__(layout, count, mesh, places)
    self.path = path
    self._headers = _read_headers(path, count, _header_of(layout.label))
    self.labels, self.masks = self._headers["label"], self._headers["mask"]
    self._exists = self._headers["header"] == _sums(self._headers)
    self._checked = np.zeros(count, bool)

  def open(self, fill: Callable[[list[range]], None]) -> None:
    """Open or create the file; `fill` recomputes spans with damaged rows."""
    self._fill = fill
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with files.writing(self.path):
      self._file = os.open(self.path, flags, 0o666)
      weakref.finalize(self, os.close, self._file)
      os.ftruncate(self._file, self._offset(len(self.labels)))
    written = _bytes_of(self._headers).any(axis=1)
    damaged = int((written & ~self._exists).sum())
    if jax.process_count() > 1:
      damaged += self._check()
    self._warn(damaged)

  def unreadable(self) -> np.ndarray:
    """Return the places, int64 (k,), of rows whose image was unreadable."""
    return np.flatnonzero(self._exists & (self.masks == 0))

  def missing(self) -> list[range]:
    """Return spans of incomplete batches; all processes must call this."""
    step = self._places.step
    absent = np.unique(np.flatnonzero(~self._exists) // step)
    spans: list[range] = []
    for i in processes.union_over_processes(absent.tolist()):
      first = i * step
      if spans and spans[-1].stop == first:
        first = spans.pop().start
      spans.append(range(first, (i + 1) * step, step))
    return spans

  def _put(self, part: slice, inputs: Any) -> None:
    """Write rows before headers: a valid header marks its row as present."""
    headers = self._headers[part]
    leaves = [_bytes_of(leaf) for leaf in self._to_host(inputs)]
    rows = np.concatenate(leaves, axis=1)[: len(headers)]
    headers["row"] = [zlib.crc32(row) for row in rows]
    headers["header"] = _sums(headers)
    with files.writing(self.path):
      self._write(rows, self._offset(part.start))
      self._write(headers, part.start * headers.itemsize)
    self._exists[part], self._checked[part] = True, False

  def take(self, places: np.ndarray) -> Any:
    """Return rows; only a single process can recompute damaged rows."""
    leaves = self._layout.empty(len(places))
    whole = self._read(places, leaves)
    if not whole and jax.process_count() == 1:
      self._warn(self._check())
      self._fill(self.missing())
      whole = self._read(places, leaves)
    if not whole:
      raise TrainingError(
        f"{self.path} has rows that are damaged or unreadable. Run the same "
        "command again to recompute them; if that does not help, the disk is "
        "failing: set another config.cache.dir."
      )
    return self._to_devices(leaves)

  def _check(self) -> int:
    """Verify all rows, and mark damaged rows as missing.

    Return the number of damaged rows.
    """
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
        "%s: damaged rows: %d. They are recomputed.", self.path, damaged
      )

  def _read(self, places: np.ndarray, leaves: list[np.ndarray]) -> bool:
    """Read the rows at `places`, int64 (b,), into `leaves`.

    Return whether all these rows are readable and undamaged.
    """
    parts = [_bytes_of(leaf) for leaf in leaves]
    views = [(part.reshape(-1).data, part.shape[1]) for part in parts]
    nbytes = self._layout.nbytes
    try:
      for i, offset in enumerate(self._offset(places).tolist()):
        row = [view[i * size : (i + 1) * size] for view, size in views]
        if os.preadv(self._file, row, offset) < nbytes:
          return False
    except OSError:  # for example, a sector of the disk is unreadable
      return False
    for k in np.flatnonzero(~self._checked[places]):
      crc, place = 0, places[k]
      for part in parts:
        crc = zlib.crc32(part[k], crc)
      self._checked[place] = crc == self._headers["row"][place]
    return bool(self._checked[places].all())

  def _offset(self, place: Any) -> Any:
    """Return the offset in bytes of the row at `place`, an int or an array."""
    return self._headers.nbytes + place * self._layout.nbytes

  def _write(self, values: np.ndarray, offset: int) -> None:
    left = values.view(np.uint8).reshape(-1).data
    while left:  # one call of `pwrite` writes at most 2 GiB
      written = os.pwrite(self._file, left, offset)
      left, offset = left[written:], offset + written


def _read_headers(path: Path, count: int, header: np.dtype) -> np.ndarray:
  """Return `count` headers; headers beyond the end of the file are zeros."""
  headers = np.zeros(count, header)
  with contextlib.suppress(OSError), path.open("rb") as file:
    file.readinto(headers.view(np.uint8).data)
  return headers


def _sums(headers: np.ndarray) -> np.ndarray:
  """Return the CRC32 of each header without its last field, uint32 (n,)."""
  fields = _bytes_of(headers)[:, :-4]
  sums = [zlib.crc32(field) for field in np.ascontiguousarray(fields)]
  return np.array(sums, np.uint32)


def _bytes_of(leaf: np.ndarray) -> np.ndarray:
  """Return the bytes of an array (b, ...) as uint8 (b, m), copied if needed."""
  rows = np.ascontiguousarray(leaf)
  # The number of columns is computed, because reshape(b, -1) fails if b is 0.
  rows = rows.reshape(len(leaf), math.prod(leaf.shape[1:]))
  return rows.view(np.uint8)

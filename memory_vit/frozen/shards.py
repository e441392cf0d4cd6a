"""Kept rows on disk: memory-mapped shards, each with its SHA-256.

A folder holds, for every shard, NUMBER.rows (rows one after the other, all
leaves of an image side by side) and NUMBER.json (labels, masks, examples that
could not be read, and digests), which is written last: a shard without it is
none. What is damaged is made again.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.frozen.layout import RowLayout
from memory_vit.frozen.rows import Batch, empty_labels, put_labels, to_host
from memory_vit.runtime import checksums, files, processes, sharding

logger = logging.getLogger(__name__)

SHARD_BYTES = 64 * 2**20
# Of NUMBER.json, for a row: a label, a mask, and what separates them.
_MOST_BYTES_OF_A_LABEL = 64
# Of NUMBER.json beside the labels: examples that could not be read, and why.
_MOST_BYTES_BESIDE = 2**20


def tidy(folder: Path) -> None:
  """Remove what a process that was killed had begun to write."""
  for left in folder.glob(".*.part"):
    left.unlink()


class ShardRows:
  """Rows in shards on disk; see `rows.Rows`.

  Attributes:
    folder: of these rows alone.
    labels: int32 (n,).
    masks: float32 (n,).
    unreadable: index -> why, of the examples that could not be read when the
      shards that were found were made.
  """

  def __init__(
    self,
    layout: RowLayout,
    count: int,
    mesh: Mesh,
    places: range,
    folder: Path,
    unreadable: Callable[[], Mapping[int, str]] = dict,
  ) -> None:
    """Open the shards that are there and whole; every byte is read.

    Args:
      layout: of a row.
      count: n.
      mesh: over which a batch is split.
      places: at which the batches of this process start.
      folder: of these rows alone; to put some, its lock is needed.
      unreadable: the examples that cannot be read, as far as is known.
    """
    self._layout, self._mesh, self.folder = layout, mesh, folder
    self._places, self._count, self._known = places, count, unreadable
    batches = max(1, SHARD_BYTES // (places.step * layout.nbytes))
    self._size = batches * places.step
    self._number = -(-places.stop // self._size)
    self.labels, self.masks = empty_labels(count)
    self.unreadable: dict[int, str] = {}
    self._buffer = np.empty(0, layout.dtype)
    self._maps = [self._open(i) for i in range(self._number)]

  def missing(self) -> list[range]:
    """See `Rows`; what one process lacks, all of them make again."""
    missing = [i for i, shard in enumerate(self._maps) if shard is None]
    spans: list[range] = []
    step, size = self._places.step, self._size
    for i in processes.union_over_processes(missing):
      first, last = i * size, min((i + 1) * size, self._places.stop)
      if spans and spans[-1].stop == first:
        first = spans.pop().start
      spans.append(range(first, last, step))
    return spans

  def put(self, start: int, inputs: Any, batch: Batch) -> None:
    """See `Rows`; a shard is written when its last batch is there."""
    i, place = divmod(start, self._size)
    if place == 0:
      self._buffer = np.empty(self._rows_of(i), self._layout.dtype)
    host = to_host(self._layout.narrow(inputs), self._mesh)
    self._layout.fill(self._buffer[place:], host)
    put_labels(self, start, batch)
    end = min((i + 1) * self._size, self._places.stop)
    if start + self._places.step == end:
      self._write(i)

  def take(self, places: np.ndarray) -> Any:
    """See `Rows`."""
    shards, rows = np.divmod(places, self._size)
    found = [self._maps[i] for i in shards]
    leaves = [
      np.stack([
        shard[str(i)][row]
        for shard, row in zip(found, rows, strict=True)
        if shard is not None
      ])
      for i in range(len(self._layout.shapes))
    ]  # fmt: skip
    batch = jax.tree.unflatten(self._layout.treedef, leaves)
    return self._layout.widen(sharding.shard_batch(batch, self._mesh))

  def _rows_of(self, i: int) -> int:
    """Rows of this process in a shard; the last may have none of some."""
    return len(range(self._count)[i * self._size : (i + 1) * self._size])

  def _open(self, i: int) -> np.ndarray | None:
    """Map a shard; None where it is not there, or is damaged."""
    rows, seal = self._files(i)
    if not seal.exists():
      return None
    try:
      metadata = self._read_seal(seal, self._rows_of(i))
      expected = self._rows_of(i) * self._layout.nbytes
      if rows.stat().st_size != expected:
        raise ValueError(
          f"{rows.name} has {rows.stat().st_size:,} bytes, expected "
          f"{expected:,}"
        )
      if checksums.file_digest(rows) != metadata["sha256"]:
        raise ValueError(f"{rows.name} is not what was written (SHA-256)")
      unreadable = {
        int(k): str(why) for k, why in metadata["unreadable"].items()
      }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      logger.warning(
        "%s: shard %d is damaged, and is made again: %s",
        self.folder, i, error,
      )  # fmt: skip
      return None
    part = slice(i * self._size, (i + 1) * self._size)
    self.labels[part], self.masks[part] = metadata["labels"], metadata["masks"]
    self.unreadable |= unreadable
    return self._map(rows)

  def _read_seal(self, path: Path, rows: int) -> dict[str, Any]:
    """What a shard's JSON file says, if it is what was written.

    Raises:
      ValueError: where it is not; and others where it is something else.
    """
    most = _MOST_BYTES_BESIDE + rows * _MOST_BYTES_OF_A_LABEL
    if path.stat().st_size > most:
      raise ValueError(f"{path.name} has more than {most:,} bytes")
    values = json.loads(path.read_text(encoding="utf-8"))
    metadata = dict(values["shard"])
    if values["sha256"] != _digest(metadata):
      raise ValueError(f"{path.name} is not what was written (SHA-256)")
    if not len(metadata["labels"]) == len(metadata["masks"]) == rows:
      raise ValueError(f"{path.name} has other rows, expected {rows}")
    return metadata

  def _write(self, i: int) -> None:
    """Write the shard in the buffer, and map it."""
    rows, seal = self._files(i)
    part = slice(i * self._size, (i + 1) * self._size)
    with files.writing(rows), files.replacing(rows) as scratch:
      self._buffer.tofile(scratch)
    metadata = {
      "sha256": hashlib.sha256(self._buffer.view(np.uint8).data).hexdigest(),
      "labels": self.labels[part].tolist(),
      "masks": self.masks[part].tolist(),
      "unreadable": {str(k): why for k, why in self._known().items()},
    }
    text = json.dumps({"sha256": _digest(metadata), "shard": metadata})
    with files.writing(seal), files.replacing(seal) as scratch:
      scratch.write_text(text + "\n", encoding="utf-8")
    self._maps[i] = self._map(rows)
    self._buffer = np.empty(0, self._layout.dtype)

  def _map(self, rows: Path) -> np.ndarray:
    """The rows of a file; they are read when they are used."""
    if not rows.stat().st_size:  # no file of no bytes can be mapped
      return np.empty(0, self._layout.dtype)
    return np.memmap(rows, self._layout.dtype, mode="r")

  def _files(self, i: int) -> tuple[Path, Path]:
    return self.folder / f"{i:05}.rows", self.folder / f"{i:05}.json"


def _digest(metadata: Mapping[str, Any]) -> str:
  """SHA-256 of what a JSON file says."""
  return hashlib.sha256(
    json.dumps(metadata, sort_keys=True).encode()
  ).hexdigest()

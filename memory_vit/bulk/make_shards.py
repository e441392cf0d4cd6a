"""Make shards: read and decode rows ahead of the device, and write them.

An engine only decides which process makes each shard.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from memory_vit.bulk import shard_file
from memory_vit.bulk.plan import Plan
from memory_vit.bulk.readers import ImageRow
from memory_vit.errors import DataError
from memory_vit.images.reader import ImageReader, Prepared
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime.messages import escaped

# Number of batches that the CPU decodes while the device computes a batch.
AHEAD = 2
# Error numbers of permanent faults. All other errors (such as disk errors,
# stale file handles and time-outs) may be transient.
_LASTING = {
  errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
  errno.EACCES, errno.EPERM, errno.EINVAL, errno.EILSEQ, errno.ENXIO,
}  # fmt: skip
# The rows of a batch before decoding: (number of the shard, rows).
_Rows = tuple[int, list[ImageRow]]


def image_reader(memory_mib: int, batch_size: int, side: int) -> ImageReader:
  """Return a reader; raise `ConfigError` if the memory is too small."""
  return ImageReader(
    memory_mib, batch_size, side, ahead=AHEAD, option="--memory_mib"
  )


class Model(Protocol):
  """A loaded model that computes columns from images."""

  schema: pa.Schema
  facts: dict[str, Any]
  images: ImageReader
  preprocessing: EvalPreprocessing

  def columns(self, pixels: np.ndarray) -> list[pa.Array]:
    """Return k values per field of `schema`, for float32 (k, side, side, 3)."""


def make_shards(
  plan: Plan,
  folder: Path,
  model: Model,
  shards: Iterable[int],
  count: Callable[[int], None] = lambda images: None,
) -> None:
  """Make shards in order; `count` gets the size of each written batch.

  A transient read error ends the run, because the shard would otherwise be
  finished with an error in place of the image.
  """
  schema = pa.schema([*shard_file.COMMON, *model.schema])
  decoded = model.images.read_ahead(_batches(plan, shards), model.preprocessing)

  def rows_of(
    group: Iterable[tuple[_Rows, list[Prepared]]],
  ) -> Iterator[pa.RecordBatch]:
    for (_, rows), pixels in group:
      _require_lasting(rows, pixels)
      yield _record_batch(rows, pixels, model, schema)
      count(len(rows))

  for shard, group in itertools.groupby(decoded, key=lambda item: item[0][0]):
    shard_file.write_shard(folder, plan, shard, schema, rows_of(group))


def _batches(
  plan: Plan, shards: Iterable[int]
) -> Iterator[tuple[_Rows, list[str | bytes | DataError]]]:
  """Yield ((shard, rows), undecoded images) of each batch, in order of shards.

  Every shard begins with a new batch, so that the rows of a shard do not depend
  on which other shards the process makes.
  """
  for shard in shards:
    rows = plan.inventory.rows(plan.numbers(shard), plan.columns)
    while batch := list(itertools.islice(rows, plan.batch_size)):
      yield (
        (shard, batch),
        [
          DataError(row.reason) if row.image is None else row.image
          for row in batch
        ],
      )


def _require_lasting(
  rows: Sequence[ImageRow], pixels: Sequence[Prepared]
) -> None:
  """Raise `DataError` if an image has a read error that may be transient."""
  for row, problem in zip(rows, pixels, strict=True):
    cause = problem.__cause__ if isinstance(problem, DataError) else None
    if isinstance(cause, OSError) and cause.errno not in {None, *_LASTING}:
      raise DataError(
        f"{escaped(row.path)} cannot be read now: {problem}. Finished shards "
        "are kept. To resume, give the same command again."
      )


def _record_batch(
  rows: Sequence[ImageRow],
  prepared: Sequence[Prepared],
  model: Model,
  schema: pa.Schema,
) -> pa.RecordBatch:
  """Return the rows of the output for a batch of images.

  For images that cannot be read, the columns of the model's outputs are null.
  """
  errors = [str(p) if isinstance(p, DataError) else None for p in prepared]
  pixels = [p for p in prepared if not isinstance(p, DataError)]
  columns = [
    pa.array([row.number for row in rows]),
    pa.array([row.path for row in rows]),
    pa.array([row.label for row in rows], pa.string()),
    pa.array(errors, pa.string()),
  ]
  if pixels:
    numbers = itertools.count()
    places = pa.array([next(numbers) if e is None else None for e in errors])
    columns += [a.take(places) for a in model.columns(np.stack(pixels))]
  else:
    columns += [pa.nulls(len(errors), field.type) for field in model.schema]
  return pa.RecordBatch.from_arrays(columns, schema=schema)

"""Write a shard of the output: a Parquet file that is whole or not there.

It is written under a name of its own and then renamed, so that two writers of
one shard cannot spoil it: both write the same rows, and one of them is last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memory_vit.bulk.plan import Plan
from memory_vit.runtime import files, parquet

# Bytes of rows that wait to become a row group.
_GROUP_BYTES = 64 * 2**20
# Columns that every output begins with.
COMMON = (
  pa.field("id", pa.int64(), nullable=False),
  pa.field("path", pa.string(), nullable=False),
  pa.field("label", pa.string()),
  pa.field("error", pa.string()),
)


@dataclasses.dataclass(frozen=True)
class ShardCounts:
  """The rows of a finished shard.

  Attributes:
    images: all of them.
    errors: those that could not be read.
  """

  images: int
  errors: int


class ShardWriter:
  """Takes the rows of a shard batch by batch; see `writing_shard`."""

  def __init__(self, writer: pq.ParquetWriter) -> None:
    self._writer, self._bytes = writer, 0
    self._batches: list[pa.RecordBatch] = []

  def add(self, batch: pa.RecordBatch) -> None:
    """Add rows."""
    self._batches.append(batch)
    self._bytes += batch.nbytes
    if self._bytes >= _GROUP_BYTES:
      self.flush()

  def flush(self) -> None:
    """Write the rows that wait."""
    if self._batches:
      table = pa.Table.from_batches(self._batches)
      self._writer.write_table(table, row_group_size=len(table))
    self._batches, self._bytes = [], 0


@contextlib.contextmanager
def writing_shard(
  folder: Path,
  plan: Plan,
  shard: int,
  schema: pa.Schema,
  described: Mapping[str, Any],
) -> Iterator[ShardWriter]:
  """Yield a writer; the shard is there once all went well.

  Args:
    folder: of the output.
    plan: of the run.
    shard: number, from 0.
    schema: of the rows.
    described: of the output, for its metadata; JSON values.

  Raises:
    TrainingError: where it cannot be written.
  """
  path = folder / plan.name(shard)
  about = {**described, "plan": plan.digest, "shard": shard}
  schema = schema.with_metadata({parquet.METADATA: json.dumps(about).encode()})
  with (
    files.writing(path, pa.ArrowException),
    files.replacing(path) as part,
    parquet_writer(part, schema) as file,
  ):
    writer = ShardWriter(file)
    yield writer
    writer.flush()


def parquet_writer(
  path: Path, schema: pa.Schema
) -> contextlib.AbstractContextManager[pq.ParquetWriter]:
  """Open a Parquet file to write rows to."""
  return parquet.writing_sealed(
    path,
    schema,
    compression=_compression(schema),
    # Dictionaries of numbers that never repeat would only cost time.
    use_dictionary=[_leaf(f) for f in schema if _repeats(f.type)],
  )


def undamaged(folder: Path, plan: Plan, shard: int) -> ShardCounts | None:
  """Find a finished shard as `finished` does, and read every byte of it."""
  try:
    parquet.require_whole(folder / plan.name(shard))
  except (OSError, ValueError):
    return None
  return finished(folder, plan, shard)


def finished(folder: Path, plan: Plan, shard: int) -> ShardCounts | None:
  """What is in a shard, by its footer.

  None where it is not there, or is not of this plan.
  """
  path = folder / plan.name(shard)
  try:
    metadata = pq.read_metadata(path)
    about = parquet.described(metadata.schema.to_arrow_schema())
    whole = about["plan"] == plan.digest and about["shard"] == shard
  except (OSError, pa.ArrowException, LookupError, TypeError, ValueError):
    return None
  if not whole or metadata.num_rows != len(plan.numbers(shard)):
    return None
  return ShardCounts(metadata.num_rows, count_errors(metadata))


def count_errors(metadata: pq.FileMetaData) -> int:
  """Rows with an error, by the footer of a file: nothing else is read."""
  place = metadata.schema.names.index("error")
  errors = 0
  for i in range(metadata.num_row_groups):
    group = metadata.row_group(i)
    errors += group.num_rows - group.column(place).statistics.null_count
  return errors


def _compression(schema: pa.Schema) -> dict[str, str]:
  """zstd, but for arrays of numbers, which it does not make smaller."""
  return {
    _leaf(field): "none" if _is_array(field.type) else "zstd"
    for field in schema
  }


def _is_array(type_: pa.DataType) -> bool:
  """Whether values of a type are many floats."""
  if pa.types.is_list(type_):
    return pa.types.is_floating(type_.value_type)
  return pa.types.is_fixed_size_binary(type_)


def _leaf(field: pa.Field) -> str:
  """The name of a column as Parquet has it: of a list, that of its values."""
  nested = pa.types.is_list(field.type)
  return f"{field.name}.list.element" if nested else field.name


def _repeats(type_: pa.DataType) -> bool:
  """Whether values of a type occur again and again: names of classes."""
  if pa.types.is_list(type_):
    type_ = type_.value_type
  return pa.types.is_string(type_)

"""Write a shard of the output: a Parquet file that is complete or missing.

A shard gets its name once it is complete, so two processes that write the same
shard do no harm: both write the same rows, and the last one replaces the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import pyarrow as pa
import pyarrow.parquet as pq

from memory_vit.bulk.plan import Plan
from memory_vit.runtime import files, parquet
from memory_vit.version import __version__

# Minimum number of bytes in a row group, except in the last group.
_GROUP_BYTES = 64 * 2**20
# The first columns of every output.
COMMON = (
  pa.field("id", pa.int64(), nullable=False),
  pa.field("path", pa.string(), nullable=False),
  pa.field("label", pa.string()),
  pa.field("error", pa.string()),
)


def write_shard(
  folder: Path,
  plan: Plan,
  shard: int,
  schema: pa.Schema,
  batches: Iterable[pa.RecordBatch],
) -> None:
  """Write a shard with the metadata of its plan."""
  path = folder / plan.name(shard)
  about = {
    **plan.model,
    "versions": {
      "memory_vit": __version__,
      "jax": jax.__version__,
      "pyarrow": pa.__version__,
      "device": jax.devices()[0].device_kind,
    },
    "plan": plan.digest,
    "shard": shard,
  }
  schema = schema.with_metadata({parquet.METADATA: json.dumps(about).encode()})
  with (
    files.writing(path, pa.ArrowException),
    files.replacing(path) as part,
    parquet.writing_sealed(part, schema, **_encoding(schema)) as file,
  ):
    for table in _row_groups(batches):
      file.write_table(table, row_group_size=len(table))


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
  waiting: list[pa.RecordBatch] = []
  size = 0
  for batch in batches:
    waiting.append(batch)
    size += batch.nbytes
    if size >= _GROUP_BYTES:
      yield pa.Table.from_batches(waiting)
      waiting, size = [], 0
  if waiting:
    yield pa.Table.from_batches(waiting)


def is_whole(folder: Path, plan: Plan, shard: int) -> bool:
  """Return whether a shard exists and is undamaged; check every byte."""
  try:
    parquet.require_whole(folder / plan.name(shard))
  except (OSError, ValueError):
    return False
  return errors_of(folder, plan, shard) is not None


def errors_of(folder: Path, plan: Plan, shard: int) -> int | None:
  """Count the rows of a shard that have an error, from its footer.

  Return None if the shard is missing, unreadable, or not as `plan` describes.
  """
  try:
    metadata = pq.read_metadata(folder / plan.name(shard))
    about = parquet.described(metadata.schema.to_arrow_schema())
    is_own = about["plan"] == plan.digest and about["shard"] == shard
  except (OSError, pa.ArrowException, LookupError, TypeError, ValueError):
    return None
  if not is_own or metadata.num_rows != len(plan.numbers(shard)):
    return None
  column = metadata.schema.names.index("error")
  groups = map(metadata.row_group, range(metadata.num_row_groups))
  return sum(
    g.num_rows - g.column(column).statistics.null_count for g in groups
  )


def _encoding(schema: pa.Schema) -> dict[str, Any]:
  """Return options of the Parquet writer for compression and dictionaries.

  Floats are not compressed, because zstd hardly shrinks them. A dictionary only
  helps if values often repeat, so only text gets one.
  """
  compression, dictionaries = {}, []
  for field in schema:
    name, kind = field.name, field.type
    if pa.types.is_list(kind):
      # In Parquet, the values of a list are in a column NAME.list.element.
      name, kind = f"{name}.list.element", kind.value_type
    is_dense = pa.types.is_floating(kind) or pa.types.is_fixed_size_binary(kind)
    compression[name] = "none" if is_dense else "zstd"
    if pa.types.is_string(kind):
      dictionaries.append(name)
  return {"compression": compression, "use_dictionary": dictionaries}

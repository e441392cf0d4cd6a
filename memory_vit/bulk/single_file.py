"""An output in one file, NAME.parquet: shards that are joined at the end.

Until then they lie in NAME.parquet.shards beside it.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from memory_vit.bulk import shard_file
from memory_vit.bulk.plan import FOLDER, Plan
from memory_vit.bulk.shard_file import ShardCounts
from memory_vit.errors import ConfigError, DataError, TrainingError
from memory_vit.runtime import files, parquet
from memory_vit.runtime.messages import brief, first_line

_SUFFIX = ".parquet"


def is_one(output: Path) -> bool:
  """Whether an output is a file, by its name."""
  return output.suffix == _SUFFIX and not output.is_dir()


def shard_folder(output: Path) -> Path:
  """Where the shards of an output are."""
  if not is_one(output):
    return output
  return output.with_name(f"{output.name}.shards")


def lock_file(output: Path) -> Path:
  """By which two commands keep off one output: beside it, and kept."""
  return output.with_name(f".{output.name}.lock")


def counts(output: Path, plan: Plan) -> ShardCounts | None:
  """What is in the file of an output; None where it is not there.

  Raises:
    ConfigError: where something else is.
    DataError: where it is damaged.
  """
  if not is_one(output) or not output.exists():
    return None
  try:
    parquet.require_whole(output)
    metadata = pq.read_metadata(output)
    about = parquet.described(metadata.schema.to_arrow_schema())
    same = about["plan"] == plan.digest
  except OSError as error:
    raise DataError(
      f"--output {brief(str(output))} is damaged ({first_line(error)}): remove "
      "it, and give the same command again."
    ) from error
  except (pa.ArrowException, LookupError, TypeError, ValueError):
    same = False
  if not same:
    raise ConfigError(
      f"--output {brief(str(output))} is there, and holds something else, or "
      "rows of other inputs, tasks or options: give another --output."
    )
  return ShardCounts(metadata.num_rows, shard_file.count_errors(metadata))


def join(folder: Path, plan: Plan, output: Path) -> None:
  """Write all shards to one file, in order; a row group at a time.

  Raises:
    TrainingError: where a shard is damaged, or the file cannot be written.
  """
  first = pq.read_schema(folder / plan.name(0))
  about = dict(parquet.described(first))
  del about["shard"]
  text = json.dumps(about).encode()
  schema = first.with_metadata({parquet.METADATA: text})
  with (
    files.writing(output, pa.ArrowException),
    files.replacing(output) as part,
    shard_file.parquet_writer(part, schema) as writer,
  ):
    for i in range(plan.shards):
      for table in _row_groups(folder / plan.name(i)):
        writer.write_table(table.cast(schema), row_group_size=len(table))


def _row_groups(path: Path) -> Iterator[pa.Table]:
  """The rows of a shard, as they were written."""
  try:
    with parquet.checked(path) as shard:
      for group in range(shard.num_row_groups):
        yield shard.read_row_group(group)
  except (OSError, pa.ArrowException) as error:
    raise TrainingError(
      f"{path} is damaged ({first_line(error)}). Give the same command again: "
      "it is made again."
    ) from error


def remove_shards(folder: Path, plan: Plan) -> None:
  """Remove the shards that were joined; what we did not write stays."""
  if not folder.exists():
    return
  for i in range(plan.shards):
    (folder / plan.name(i)).unlink(missing_ok=True)
  for name in ("plan.json", "inputs.parquet"):
    (folder / FOLDER / name).unlink(missing_ok=True)
  with contextlib.suppress(OSError):  # something else lies there
    (folder / FOLDER).rmdir()
    folder.rmdir()

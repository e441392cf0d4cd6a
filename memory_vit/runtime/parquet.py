"""Parquet files with a description and a SHA-256.

Parquet itself has checksums only for its pages, and none for its footer, which
holds the column names and all metadata.
"""

import contextlib
import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memory_vit.errors import DataError
from memory_vit.runtime.messages import escaped, first_line

# Pattern of the names that `shard_name` returns.
SHARDS = "part-*.parquet"
# Key under which the metadata holds the description, as JSON.
METADATA = b"memory_vit"
# The metadata holds this text, directly followed by the SHA-256 of the file.
# The digits of the SHA-256 itself are not hashed.
_SEAL = b"SHA-256 of all but this: "
_DIGITS = 64


@contextlib.contextmanager
def writing_sealed(
  path: Path, schema: pa.Schema, **options: Any
) -> Iterator[pq.ParquetWriter]:
  """Yield a writer; once it is closed, write the SHA-256 into the file."""
  room = {b"memory_vit_seal": _SEAL + b"0" * _DIGITS}
  sealed = schema.with_metadata({**(schema.metadata or {}), **room})
  with pq.ParquetWriter(
    path, sealed, write_page_checksum=True, **options
  ) as writer:
    yield writer
  place, _, digest = _seal_of(path)
  with path.open("r+b") as file:
    file.seek(place)
    file.write(digest)


def require_whole(path: Path) -> None:
  """Raise `OSError` if a file is damaged, `ValueError` if it has no SHA-256."""
  place, stored, digest = _seal_of(path)
  if place < len(_SEAL):
    raise ValueError(f"{path.name} has no SHA-256")
  if stored != digest:
    raise OSError(f"{path.name} does not match its saved SHA-256")


def _seal_of(path: Path) -> tuple[int, bytes, bytes]:
  """Return (position of the saved SHA-256, saved SHA-256, actual SHA-256)."""
  with (
    path.open("rb") as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    memoryview(content) as view,
  ):
    place = content.rfind(_SEAL) + len(_SEAL)
    digest = hashlib.sha256(view[:place])
    digest.update(view[place + _DIGITS :])
    stored = content[place : place + _DIGITS]
    return place, stored, digest.hexdigest().encode()


def shard_name(shard: int, shards: int) -> str:
  """Return the file name of a shard, numbered from 0."""
  return f"part-{shard:05}-of-{shards:05}.parquet"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[pq.ParquetFile]:
  """Yield an open file; raise `DataError` if opening or reading it fails."""
  try:
    # No memory map: if the file became shorter, reading would kill the process.
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
      yield file
  except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
    raise DataError(
      f"{escaped(str(path))} cannot be read: {first_line(error)}. The file may "
      "have changed, or is not a Parquet file."
    ) from error


def described(schema: pa.Schema) -> Mapping[str, Any]:
  """Return the description; `LookupError`, `ValueError`, `TypeError` if bad."""
  values = json.loads((schema.metadata or {})[METADATA])
  if not isinstance(values, dict):
    raise TypeError(f"the description is a {type(values).__name__}, not a dict")
  return values

"""Parquet files of ours: sealed with their SHA-256, and described.

The checksums of Parquet are of pages: its footer, with the names of columns and
all metadata, has none.
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

# The shards in a directory; see `shard_name`.
SHARDS = "part-*.parquet"
# The key of a description in the metadata of a file, as JSON.
METADATA = b"memory_vit"
# In its metadata, before the SHA-256 of all other bytes of the file.
_SEAL = b"SHA-256 of all but this: "
_DIGITS = 64


@contextlib.contextmanager
def writing_sealed(
  path: Path, schema: pa.Schema, **options: Any
) -> Iterator[pq.ParquetWriter]:
  """Yield a writer of a file, which is sealed at the end.

  Args:
    path: of the file.
    schema: of its rows.
    **options: of `pq.ParquetWriter`.
  """
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
  """Read every byte of a file of `writing_sealed`.

  Raises:
    OSError: where it is not what was written.
    ValueError: where it was never sealed.
  """
  place, stored, digest = _seal_of(path)
  if place < len(_SEAL):
    raise ValueError(f"{path.name} has no SHA-256")
  if stored != digest:
    raise OSError(f"{path.name} is not what was written (SHA-256)")


def _seal_of(path: Path) -> tuple[int, bytes, bytes]:
  """The position of the SHA-256 in a file, its stored and computed value."""
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
  """The name of a file of a directory of shards, numbered from 0."""
  return f"part-{shard:05}-of-{shards:05}.parquet"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[pq.ParquetFile]:
  """Open a file; pages that have a checksum are verified.

  Raises:
    DataError: where it cannot be read, also later on.
  """
  try:
    # Without a memory map: a file that gets shorter would end the process.
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
      yield file
  except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
    raise DataError(
      f"{escaped(str(path))} cannot be read: {first_line(error)}. It may have "
      "changed, or be no Parquet file."
    ) from error


def described(schema: pa.Schema) -> Mapping[str, Any]:
  """What the metadata of a file says of it.

  Raises:
    LookupError: where it says nothing; or `TypeError`, or `ValueError`.
  """
  found = json.loads((schema.metadata or {})[METADATA])
  if not isinstance(found, dict):
    raise TypeError(f"it is a {type(found).__name__}, expected a dictionary")
  return found

"""Locate the records of TFDS data sets in their files, and read broken files.

TensorFlow's reader of TFRecord files stops at the first corrupt record; told to
ignore errors, it hangs. `read` reports corrupt records, and continues.
"""

import dataclasses
import itertools
import os
import struct
from collections.abc import Iterator, Sequence

import google_crc32c

from memory_vit.data.quiet_tensorflow import tf


@dataclasses.dataclass(frozen=True)
class Shard:
  """Part of a file of `size` records: `take` records after the first `skip`."""

  path: str
  skip: int
  take: int
  size: int


@dataclasses.dataclass(frozen=True)
class CorruptRecord:
  reason: str


def place(shards: Sequence[Shard], index: int) -> str:
  for shard in shards:
    if index < shard.take:
      return f"{shard.path}, record {shard.skip + index} of {shard.size}"
    index -= shard.take
  raise IndexError(index)


def read(shard: Shard) -> Iterator[bytes | CorruptRecord]:
  """Yield each record of a TFRecord file, or the reason why it is broken.

  After a record whose length is corrupt, the rest of the file is lost.
  """
  last_good, again = "none", None
  end = shard.skip + shard.take
  for i, record in enumerate(itertools.islice(_records(shard.path), end)):
    if isinstance(record, CorruptRecord):
      # Add the number of the last good record to the reason. For all lost
      # records, `_records` repeats one object: make its new text only once.
      if again is None or again[0] is not record:
        named = f"{record.reason}; last good record: {last_good}"
        again = record, CorruptRecord(named)
      record = again[1]
    else:
      last_good = str(i)
    if i >= shard.skip:
      yield record


def require_room(shards: Sequence[Shard]) -> None:
  """Raise if a file has a record that is longer than the rest of the file.

  TensorFlow's reader would allocate memory for the record, and end the process
  if that fails. Other corrupt lengths are left to TensorFlow's reader.
  """
  for shard in shards:
    path = shard.path
    if "://" in path or not os.path.exists(path):
      continue
    size = os.path.getsize(path)
    with open(path, "rb") as file:
      while len(header := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", header[:8])
        if length + 4 > size - file.tell():
          problem = (
            f"{path}: a record of {length:,} bytes in a file of {size:,}"
          )
          raise tf.errors.DataLossError(None, None, problem)
        file.seek(length + 4, os.SEEK_CUR)


class _CutError(Exception):
  """Raised if no further record can be found in a file."""


def _records(path: str) -> Iterator[bytes | CorruptRecord]:
  """Yield the records of a file, then repeat one `CorruptRecord` forever.

  The repeated `CorruptRecord` says why no record follows. If the file is
  intact, the reason is the end of the file.
  """
  try:
    with tf.io.gfile.GFile(path, "rb") as file:
      size = file.size()
      while True:
        yield _record(file, size)
  except _CutError as cut:
    reason = str(cut)
  except tf.errors.OpError as error:
    reason = f"the file cannot be read ({type(error).__name__})"
  yield from itertools.repeat(CorruptRecord(reason))


def _record(file: tf.io.gfile.GFile, size: int) -> bytes | CorruptRecord:
  """Read the next record; raise `_CutError` if no further record can be found.

  A record consists of the length of the content (8 bytes), a checksum of the
  length (4 bytes), the content, and a checksum of the content (4 bytes).
  """
  header = file.read(12)
  if not header:
    raise _CutError("the file ends before this record")
  if len(header) < 12:
    raise _CutError("the file ends in the middle of this record")
  length, checksum = struct.unpack("<QI", header)
  if _checksum(header[:8]) != checksum:
    raise _CutError(
      "the record's length is corrupt, or the file is not a TFRecord file"
    )
  # Compare the length with the rest of the file before reading, because `read`
  # allocates the whole length, even if the file is shorter.
  is_there = length + 4 <= size - file.tell()
  rest = file.read(length + 4) if is_there else b""
  if len(rest) < length + 4:
    raise _CutError(f"the file ends within this record of {length:,} bytes")
  if _checksum(rest[:-4]) != struct.unpack("<I", rest[-4:])[0]:
    return CorruptRecord("it is corrupt (its checksum is wrong)")
  return rest[:-4]


def _checksum(content: bytes) -> int:
  """Compute the masked CRC-32C that TFRecord files use."""
  value = google_crc32c.value(content)
  return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF

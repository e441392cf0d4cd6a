"""The files of TFDS data sets: which record lies where, and broken ones.

TensorFlow's reader of TFRecord files ends at the first record that is corrupt;
told to ignore that, it hangs. What is here reads on behind it, and says which
record of which file it was.
"""

import dataclasses
import itertools
import struct
from collections.abc import Iterator, Sequence

import google_crc32c
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Shard:
  """Some of the records of a file.

  Attributes:
    path: of the file.
    skip: records in front of those that are meant.
    take: how many are meant.
    size: how many the file should hold.
  """

  path: str
  skip: int
  take: int
  size: int


@dataclasses.dataclass(frozen=True)
class Lost:
  """A record that cannot be read, and why."""

  reason: str


def place(shards: Sequence[Shard], index: int) -> str:
  """Names the file of example `index` of some shards, and the record in it."""
  for shard in shards:
    if index < shard.take:
      return f"{shard.path}, record {shard.skip + index} of {shard.size}"
    index -= shard.take
  raise IndexError(index)


def read(shard: Shard) -> Iterator[bytes | Lost]:
  """The records of a TFRecord file, broken ones too.

  Behind a record whose length is corrupt nothing can be found: all that follow
  are lost with it.

  Yields:
    `shard.take` times the bytes of a record, or why it is lost. Records are
    numbered from 0.
  """
  last_good = "none"
  end = shard.skip + shard.take
  for i, record in enumerate(itertools.islice(_records(shard.path), end)):
    if isinstance(record, Lost):
      record = Lost(f"{record.reason}; last good record: {last_good}")
    else:
      last_good = str(i)
    if i >= shard.skip:
      yield record


class _CutError(Exception):
  """Nothing more can be found in a file."""


def _records(path: str) -> Iterator[bytes | Lost]:
  """All records of a file; where it ends or breaks off, `Lost` for ever."""
  try:
    with tf.io.gfile.GFile(path, "rb") as file:
      while True:
        yield _record(file)
  except _CutError as cut:
    reason = str(cut)
  except tf.errors.OpError as error:
    reason = f"the file cannot be read ({type(error).__name__})"
  yield from itertools.repeat(Lost(reason))


def _record(file: tf.io.gfile.GFile) -> bytes | Lost:
  """Reads the next record.

  It lies there as its length (8 bytes), a checksum of that (4), the bytes
  themselves, and a checksum of those (4).

  Raises:
    _CutError: where there is none, or its end cannot be known.
  """
  header = file.read(12)
  if not header:
    raise _CutError("the file ends before it")
  if len(header) < 12:
    raise _CutError("the file ends in the middle of it")
  length, checksum = struct.unpack("<QI", header)
  if _checksum(header[:8]) != checksum:
    raise _CutError("it has a corrupt length, or this is no TFRecord file")
  rest = file.read(length + 4)
  if len(rest) < length + 4:
    raise _CutError("the file ends in the middle of it")
  if _checksum(rest[:-4]) != struct.unpack("<I", rest[-4:])[0]:
    return Lost("it is corrupt (its checksum is wrong)")
  return rest[:-4]


def _checksum(content: bytes) -> int:
  """CRC-32C, turned and moved as TFRecord files hold it."""
  value = google_crc32c.value(content)
  return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF

"""Files that EXIF says to turn: marked when read, turned when decoded.

Files that a person supplies are marked. Those of TFDS and tf.data are not: what
TensorFlow decodes of them is the data set.
"""

import os

from memory_vit.images import exif

# Random in every process: no file can begin like this. A byte follows.
MAGIC = b"\x00EXIF" + os.urandom(11)
HEADER = len(MAGIC) + 1


def mark(encoded: bytes) -> bytes:
  """Put its orientation in front of a file, unless it is stored upright."""
  return mark_of(exif.orientation(encoded)) + encoded


def unmarked(encoded: bytes) -> bytes:
  """The file itself."""
  return split(encoded)[1]


def split(encoded: bytes) -> tuple[int, bytes]:
  """The orientation, 1 without a mark, and the file."""
  if not encoded.startswith(MAGIC):
    return 1, encoded
  return encoded[len(MAGIC)], encoded[HEADER:]


def mark_of(orientation: int) -> bytes:
  """The mark of an orientation; none of 1, upright."""
  return MAGIC + bytes([orientation]) if orientation > 1 else b""

"""Mark image files that EXIF says to turn; decoding turns marked images.

Files that a person supplies are marked. Files of TFDS and tf.data are not:
their images are defined as what TensorFlow decodes, which ignores EXIF.
"""

import os

from memory_vit.images import exif

# A mark in front of a file consists of `MAGIC` and a byte with the orientation.
# `MAGIC` is random in every process, so no unmarked file begins with `MAGIC`.
MAGIC = b"\x00EXIF" + os.urandom(11)
HEADER = len(MAGIC) + 1


def mark(encoded: bytes) -> bytes:
  """Put a mark in front of a file, unless its image is stored upright."""
  return mark_of(exif.orientation(encoded)) + encoded


def unmarked(encoded: bytes) -> bytes:
  """Return a file without its mark, if it has one."""
  return split(encoded)[1]


def split(encoded: bytes) -> tuple[int, bytes]:
  """Return (orientation, unmarked file); the orientation is 1 without mark."""
  if not encoded.startswith(MAGIC):
    return 1, encoded
  return encoded[len(MAGIC)], encoded[HEADER:]


def mark_of(orientation: int) -> bytes:
  """Return the mark of an orientation; b"" for 1, which is upright."""
  return MAGIC + bytes([orientation]) if orientation > 1 else b""

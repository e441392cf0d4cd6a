"""Rotate and flip images by their EXIF orientation.

Cameras store pixels as the sensor was held, and viewers rotate them. Only this
tag is read, because the rest of the EXIF data may be broken, huge or nested.
"""

import struct

import numpy as np

from memory_vit.errors import DataError
from memory_vit.images import jpeg

PNG = b"\x89PNG\r\n\x1a\n"
_TAG = 0x0112  # the EXIF tag of the orientation
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
# {EXIF type code: struct format} of the integer types byte, short and long. The
# EXIF standard stores the orientation as a short; some files as byte or long.
_INTEGERS = {1: "B", 3: "H", 4: "I"}
# The search for EXIF reads at most this many chunks of a PNG or WebP file. A
# PNG with more chunks exceeds `decoding.MAX_READS`, so it is refused anyway.
_MAX_CHUNKS = 25_000
# Slice steps of rows and columns, indexed by orientation; entry 0 is not used.
# For orientations 5 to 8, rows and columns are swapped before slicing.
ROW_STEPS = (1, 1, 1, -1, -1, 1, 1, -1, -1)
COLUMN_STEPS = (1, 1, -1, -1, 1, 1, -1, -1, 1)
_SWAPPED = 5


def orientation(encoded: bytes) -> int:
  """Return the EXIF orientation of a file, 1 to 8.

  It is 1 (as stored) if EXIF has no orientation or is broken. XMP is not read.
  """
  try:
    tiff = _exif(encoded).removeprefix(jpeg.EXIF)
    order = _BYTE_ORDERS[tiff[:4]]
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    fields = tiff[start + 2 : start + 2 + 12 * count]
    fields = fields[: len(fields) // 12 * 12]
    for tag, kind, values, value in struct.iter_unpack(f"{order}HHI4s", fields):
      if tag == _TAG and values == 1:
        (number,) = struct.unpack_from(f"{order}{_INTEGERS[kind]}", value)
        return number if number in range(1, 9) else 1
  except (DataError, KeyError, struct.error):
    pass
  return 1


def swaps_axes(orientation: int) -> bool:
  """Return whether an orientation, an integer or a tensor, swaps the axes."""
  return orientation >= _SWAPPED


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
  """Return a rotated or flipped view of pixels (height, width, 3)."""
  if swaps_axes(orientation):
    pixels = pixels.swapaxes(0, 1)
  return pixels[:: ROW_STEPS[orientation], :: COLUMN_STEPS[orientation]]


def _exif(encoded: bytes) -> bytes:
  """Return the EXIF block of a JPEG, PNG or WebP file; b"" if none is found."""
  if encoded.startswith(jpeg.MAGIC):
    return jpeg.exif(encoded)
  if encoded.startswith(PNG):
    return _chunk(encoded, b"eXIf", start=8, is_png=True)
  if encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP":
    return _chunk(encoded, b"EXIF", start=12, is_png=False)
  return b""


def _chunk(encoded: bytes, wanted: bytes, *, start: int, is_png: bool) -> bytes:
  """Return the contents of the first chunk named `wanted`.

  Raise `struct.error` if the file has no such chunk; return b"" if
  `_MAX_CHUNKS` other chunks come first.
  """
  for _ in range(_MAX_CHUNKS):
    if is_png:  # a checksum of 4 bytes follows the contents
      length, name = struct.unpack_from(">I4s", encoded, start)
      behind = 4
    else:  # WebP pads the contents to an even number of bytes
      name, length = struct.unpack_from("<4sI", encoded, start)
      behind = length % 2
    if name == wanted:
      return encoded[start + 8 : start + 8 + length]
    start += 8 + length + behind
  return b""

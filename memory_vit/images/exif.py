"""Turn images as the orientation in EXIF says.

Cameras store pixels as the sensor lies, and viewers turn them. The one tag is
read here, since whatever else EXIF holds may be broken, huge or nested.
"""

import struct

import numpy as np

from memory_vit.errors import DataError
from memory_vit.images import jpeg

PNG = b"\x89PNG\r\n\x1a\n"
_TAG = 0x0112
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
# Types of an integer: a byte, a short, which is the standard's, and a long.
_INTEGERS = {1: "B", 3: "H", 4: "I"}
# A PNG or WebP file of more is not searched to its end; see
# `decoding.MAX_READS`.
_MAX_CHUNKS = 25_000
# By orientation, from 0: the steps through the rows and columns of pixels, of
# which the axes are swapped before from `_SWAPPED` on.
ROW_STEPS = (1, 1, 1, -1, -1, 1, 1, -1, -1)
COLUMN_STEPS = (1, 1, -1, -1, 1, 1, -1, -1, 1)
_SWAPPED = 5


def orientation(encoded: bytes) -> int:
  """Read the orientation of a file: 1 to 8, as EXIF numbers them.

  It is 1, as stored, if there is none, or if EXIF is broken. XMP is not read.
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
        (found,) = struct.unpack_from(f"{order}{_INTEGERS[kind]}", value)
        return found if found in range(1, 9) else 1
  except (DataError, KeyError, struct.error):
    pass
  return 1


def swaps_axes(orientation: int) -> bool:
  """Whether height and width change places; also of a tensor."""
  return orientation >= _SWAPPED


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
  """Turn pixels (height, width, 3); a view of them."""
  if swaps_axes(orientation):
    pixels = pixels.swapaxes(0, 1)
  return pixels[:: ROW_STEPS[orientation], :: COLUMN_STEPS[orientation]]


def _exif(encoded: bytes) -> bytes:
  """The block of EXIF of a file, or b"". Other kinds of files have none."""
  if encoded.startswith(jpeg.MAGIC):
    return jpeg.exif(encoded)
  if encoded.startswith(PNG):
    return _chunk(encoded, b"eXIf", start=8, is_png=True)
  if encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP":
    return _chunk(encoded, b"EXIF", start=12, is_png=False)
  return b""


def _chunk(encoded: bytes, wanted: bytes, *, start: int, is_png: bool) -> bytes:
  """The contents of the first chunk of a name; b"" or an error if none is."""
  for _ in range(_MAX_CHUNKS):
    if is_png:  # a checksum follows the contents
      length, name = struct.unpack_from(">I4s", encoded, start)
      behind = 4
    else:  # of an even number of bytes
      name, length = struct.unpack_from("<4sI", encoded, start)
      behind = length % 2
    if name == wanted:
      return encoded[start + 8 : start + 8 + length]
    start += 8 + length + behind
  return b""

"""Read the size in the header of a WebP file.

Pillow makes a decoder to read a header: it needs the whole file, and clears
two canvases while no other thread of Python runs.
"""

import struct

_HEADER_BYTES = 30  # the longest of the three
_VP8_START = b"\x9d\x01\x2a"
_VP8L_START = 0x2F
_VP8X_ALPHA = 0x10


def size(encoded: bytes) -> tuple[int, int, bool] | None:
  """Width and height of an image, and whether it has alpha.

  None if this is no WebP file; decoding it may fail nevertheless.
  """
  head = encoded[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0")
  if head[:4] != b"RIFF" or head[8:12] != b"WEBP":
    return None
  kind = head[12:16]
  if kind == b"VP8 " and head[23:26] == _VP8_START:  # lossy
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF, False
  if kind == b"VP8L" and head[20] == _VP8L_START:  # lossless
    (bits,) = struct.unpack_from("<I", head, 21)
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, bool(bits >> 28 & 1)
  if kind == b"VP8X":  # of several chunks
    width, height = (
      int.from_bytes(head[i : i + 3], "little") for i in (24, 27)
    )
    return width + 1, height + 1, bool(head[20] & _VP8X_ALPHA)
  return None

"""Read the size of an image from the header of a WebP file.

Pillow would create a decoder for this, which needs the whole file, and clears
two canvases while it holds Python's global lock.
"""

import struct

_HEADER_BYTES = 30  # the longest of the three kinds of headers
_VP8_START = b"\x9d\x01\x2a"
_VP8L_START = 0x2F
_VP8X_ALPHA = 0x10


def size(encoded: bytes) -> tuple[int, int, bool] | None:
  """Return (width, height, whether the image has alpha).

  Return None if there is no WebP header. Only the header is checked.
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
  if kind == b"VP8X":  # the extended format, with several chunks
    width, height = (
      int.from_bytes(head[i : i + 3], "little") for i in (24, 27)
    )
    return width + 1, height + 1, bool(head[20] & _VP8X_ALPHA)
  return None

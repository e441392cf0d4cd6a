"""Detect JPEG files that would take hours to decode.

A progressive JPEG paints the whole image anew with every scan. A scan may
have a few bytes and costs as much as the image has pixels.
"""

import re

MAGIC = b"\xff\xd8\xff"
# Usual encoders write 1, or up to about 15. Sixty-four of 64 megapixels take
# some seconds.
MAX_SCANS = 64
# Profiles and previews fill some hundreds of 64 KiB.
MAX_SEGMENTS = 10_000

# In front of a scan, and at the end.
_SCAN, _END = 0xDA, 0xD9
# A marker that something follows. Inside of a scan 0xFF 0x00 stands for a byte
# 0xFF, more than one 0xFF is filling, and 01 and D0 to D7 stand alone.
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")


def too_costly(encoded: bytes) -> str:
  """Say why a JPEG should not be decoded; "" if it may be.

  It is read as its decoder would: bytes of a comment, of a thumbnail or behind
  the end of the image are no scan.

  Args:
    encoded: a file that begins with `MAGIC`; it may be broken.
  """
  scans, position = 0, 2
  for _ in range(MAX_SEGMENTS):
    found = _MARKER.search(encoded, position)
    if found is None or found[1][0] == _END:
      return ""
    scans += found[1][0] == _SCAN
    if scans > MAX_SCANS:
      return f"a JPEG of more than {MAX_SCANS} scans"
    # Its length counts itself. Decoders skip nothing where it is less.
    start = found.end()
    length = int.from_bytes(encoded[start : start + 2], "big")
    position = start + max(2, length)
  return f"a JPEG of more than {MAX_SEGMENTS:,} segments"

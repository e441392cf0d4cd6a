"""Read the markers of JPEG files, to detect those that take long to decode.

A progressive JPEG paints the whole image again with every scan. A scan may
have a few bytes and costs as much as the image has pixels.
"""

import dataclasses
import re

from memory_vit.errors import DataError

MAGIC = b"\xff\xd8\xff"
# Usual encoders write 1, or up to about 15.
MAX_SCANS = 64
# Of 64 megapixels they take 2 s.
_USUAL_SCANS = 12
# Profiles and previews fill some hundreds of 64 KiB.
MAX_SEGMENTS = 10_000

# In front of a scan, and at the end.
_SCAN, _END, _ADOBE = 0xDA, 0xD9, 0xEE
# Of arithmetic coding, which takes four times as long for a byte as Huffman's,
# and which cameras do not write.
_ARITHMETIC_FRAMES = (0xC9, 0xCA, 0xCB)
# A marker that something follows. Inside of a scan 0xFF 0x00 stands for a byte
# 0xFF, more than one 0xFF is filling, and 01 and D0 to D7 stand alone.
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
# Other threads run between two searches, each of this number of bytes. Outside
# of scans, a marker has no more bytes of filling in front of it.
_SEARCHED = 2**18


@dataclasses.dataclass(frozen=True)
class Outline:
  """Properties of a JPEG file that determine its decoding time.

  Attributes:
    scans: their number.
    ended: whether the marker of the end follows them.
    adobe: whether it has Adobe's marker.
  """

  scans: int
  ended: bool
  adobe: bool

  @property
  def weight(self) -> float:
    """Decoding time per pixel, relative to a common JPEG."""
    return max(1.0, self.scans / _USUAL_SCANS)


def outline(encoded: bytes) -> Outline:
  """Read a JPEG file as its decoder would; refuse one that would take long.

  Bytes of a comment, of a thumbnail or behind the end of the image are no scan.
  """
  scans, adobe, position, marker = 0, False, 2, 0
  for _ in range(MAX_SEGMENTS):
    found = _next_marker(encoded, position, inside=marker == _SCAN)
    if found is None or found[1][0] == _END:
      return Outline(scans, found is not None, adobe)
    marker, start = found[1][0], found.end()
    scans += marker == _SCAN
    adobe |= marker == _ADOBE and encoded[start + 2 : start + 7] == b"Adobe"
    if scans > MAX_SCANS:
      raise DataError(f"a JPEG of more than {MAX_SCANS} scans")
    if marker in _ARITHMETIC_FRAMES:
      raise DataError("a JPEG with arithmetic coding, expected Huffman coding")
    # Its length counts itself. Decoders skip nothing where it is less.
    length = int.from_bytes(encoded[start : start + 2], "big")
    position = start + max(2, length)
  raise DataError(f"a JPEG of more than {MAX_SEGMENTS:,} segments")


def _next_marker(
  encoded: bytes, position: int, *, inside: bool
) -> re.Match[bytes] | None:
  """Find a marker, behind the bytes of a scan or at once."""
  for start in range(position, len(encoded), _SEARCHED):
    if found := _MARKER.search(encoded, start, start + _SEARCHED + 1):
      return found
    if not inside and start + _SEARCHED < len(encoded):
      raise DataError(f"a JPEG of more than {_SEARCHED // 1024} KiB of filling")
  return None

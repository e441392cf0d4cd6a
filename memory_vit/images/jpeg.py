"""Read the markers of JPEG files, to detect those that take long to decode.

A progressive JPEG paints the whole image again with every scan. A scan may
have a few bytes and costs as much as the image has pixels.
"""

import dataclasses
import re
from collections.abc import Iterator

from memory_vit.errors import DataError

MAGIC = b"\xff\xd8\xff"
EXIF = b"Exif\0\0"
END = b"\xff\xd9"
# Usual encoders write 1, or up to about 15.
MAX_SCANS = 64
# Of 64 megapixels they take 2 s.
_USUAL_SCANS = 12
# Profiles and previews fill some hundreds of 64 KiB.
MAX_SEGMENTS = 10_000

# In front of a scan, and at the end.
_SCAN, _END, _ADOBE, _APP1 = 0xDA, 0xD9, 0xEE, 0xE1
# Applications' segments and comments.
_IN_FRONT = (*range(0xE0, 0xF0), 0xFE)
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
  scans, adobe, marker = 0, False, 0
  for marker, start in _segments(encoded):
    scans += marker == _SCAN
    adobe |= marker == _ADOBE and encoded[start + 2 : start + 7] == b"Adobe"
    if scans > MAX_SCANS:
      raise DataError(f"a JPEG of more than {MAX_SCANS} scans")
    if marker in _ARITHMETIC_FRAMES:
      raise DataError("a JPEG with arithmetic coding, expected Huffman coding")
  return Outline(scans, marker == _END, adobe)


def exif(encoded: bytes) -> bytes:
  """EXIF of a JPEG file, with its prefix; b"" if none precedes its tables."""
  for marker, start in _segments(encoded):
    if marker not in _IN_FRONT:
      break
    if marker == _APP1 and encoded.startswith(EXIF, start + 2):
      return encoded[start + 2 : start + _length(encoded, start)]
  return b""


def is_cut(encoded: bytes) -> bool:
  """Whether a JPEG file has no end behind its first scan."""
  for marker, start in _segments(encoded):
    if marker == _SCAN:
      return encoded.rfind(END, start) < 0
  return True


def _segments(encoded: bytes) -> Iterator[tuple[int, int]]:
  """Yield each marker, and where its length stands, up to the end's."""
  position, marker = 2, 0
  for _ in range(MAX_SEGMENTS):
    found = _next_marker(encoded, position, inside=marker == _SCAN)
    if found is None:
      return
    marker, start = found[1][0], found.end()
    yield marker, start
    if marker == _END:
      return
    position = start + _length(encoded, start)
  raise DataError(f"a JPEG of more than {MAX_SEGMENTS:,} segments")


def _length(encoded: bytes, start: int) -> int:
  """Length of a segment, which counts itself: decoders skip at least that."""
  return max(2, int.from_bytes(encoded[start : start + 2], "big"))


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

"""Read the markers of JPEG files, to detect files that take long to decode.

A progressive JPEG updates the whole image with every scan. A scan may have only
a few bytes, but its decoding time grows with the number of pixels of the image.
"""

import dataclasses
import re
from collections.abc import Iterator

from memory_vit.errors import DataError

MAGIC = b"\xff\xd8\xff"
EXIF = b"Exif\0\0"
END = b"\xff\xd9"
# Maximum number of scans: common encoders write at most about 15.
MAX_SCANS = 64
# Up to this number of scans, `Outline.weight` is 1: a JPEG of 12 scans is
# decoded in 2 s, even with the maximum of 64 megapixels.
_USUAL_SCANS = 12
# Maximum number of segments; large color profiles and previews take hundreds.
MAX_SEGMENTS = 10_000

# Markers: start of a scan, end of the image, Adobe segment, segment with EXIF.
_SCAN, _END, _ADOBE, _APP1 = 0xDA, 0xD9, 0xEE, 0xE1
# Markers of the segments that may precede EXIF: APP0 to APP15, and comments.
_IN_FRONT = (*range(0xE0, 0xF0), 0xFE)
# Markers of frames with arithmetic coding. They are refused: per byte, decoding
# takes four times as long as with Huffman coding, and no camera writes them.
_ARITHMETIC_FRAMES = (0xC9, 0xCA, 0xCB)
# Matches a marker that begins a segment or ends the image, but not 0xFF00 (the
# value 0xFF in a scan), 0xFFFF (a fill byte), 0xFF01, or 0xFFD0 to 0xFFD7
# (markers without a segment).
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
# Number of bytes that are searched for a marker at once; other threads can run
# between two searches. It is also the maximum number of fill bytes between two
# segments: a file with more fill bytes is refused.
_SEARCHED = 2**18


@dataclasses.dataclass(frozen=True)
class Outline:
  """Properties of a JPEG file that determine its decoding time.

  Attributes:
    scans: the number of scans.
    ended: whether the end marker follows the scans.
    adobe: whether there is an Adobe segment.
  """

  scans: int
  ended: bool
  adobe: bool

  @property
  def weight(self) -> float:
    """Decoding time per pixel, relative to a common JPEG."""
    return max(1.0, self.scans / _USUAL_SCANS)


def outline(encoded: bytes) -> Outline:
  """Outline a JPEG file; raise `DataError` if decoding the file would be slow.

  Scan markers in comments, in thumbnails, or after the end are not counted.
  """
  scans, adobe, marker = 0, False, 0
  for marker, start in _segments(encoded):
    scans += marker == _SCAN
    adobe |= marker == _ADOBE and encoded[start + 2 : start + 7] == b"Adobe"
    if scans > MAX_SCANS:
      raise DataError(f"the JPEG has more than {MAX_SCANS} scans")
    if marker in _ARITHMETIC_FRAMES:
      raise DataError("the JPEG has arithmetic coding, expected Huffman coding")
  return Outline(scans, marker == _END, adobe)


def exif(encoded: bytes) -> bytes:
  """Return EXIF with the prefix `EXIF`; b"" if no leading segment has EXIF."""
  for marker, start in _segments(encoded):
    if marker not in _IN_FRONT:
      break
    if marker == _APP1 and encoded.startswith(EXIF, start + 2):
      return encoded[start + 2 : start + _length(encoded, start)]
  return b""


def is_cut(encoded: bytes) -> bool:
  """Return whether a JPEG has no end marker after the start of a scan."""
  for marker, start in _segments(encoded):
    if marker == _SCAN:
      return encoded.rfind(END, start) < 0
  return True


def _segments(encoded: bytes) -> Iterator[tuple[int, int]]:
  """Yield (marker, position after the marker); stop after the end marker.

  The length field of a segment begins at the yielded position.
  """
  position, marker = 2, 0
  for _ in range(MAX_SEGMENTS):
    match = _next_marker(encoded, position, inside=marker == _SCAN)
    if match is None:
      return
    marker, start = match[1][0], match.end()
    yield marker, start
    if marker == _END:
      return
    position = start + _length(encoded, start)
  raise DataError(f"the JPEG has more than {MAX_SEGMENTS:,} segments")


def _length(encoded: bytes, start: int) -> int:
  """Return the length of a segment, including its length field of 2 bytes.

  The result is at least 2, even if a broken file states a smaller length.
  """
  return max(2, int.from_bytes(encoded[start : start + 2], "big"))


def _next_marker(
  encoded: bytes, position: int, *, inside: bool
) -> re.Match[bytes] | None:
  """Return the match of the next marker; None if no marker follows.

  Raise `DataError` if the next marker is too far away, unless `position` is
  `inside` a scan.
  """
  for start in range(position, len(encoded), _SEARCHED):
    if match := _MARKER.search(encoded, start, start + _SEARCHED + 1):
      return match
    if not inside and start + _SEARCHED < len(encoded):
      raise DataError(
        f"the JPEG has more than {_SEARCHED // 1024} KiB of fill bytes between "
        "two segments"
      )
  return None

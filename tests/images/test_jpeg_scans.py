"""Scans are counted as a decoder meets them."""

import contextlib

import fake_data
import pytest

from memory_vit.errors import DataError
from memory_vit.images import jpeg

END = b"\xff\xd9"
SCAN = b"\xff\xda"


def scans(encoded):
  """Their number."""
  return jpeg.outline(encoded).scans


def progressive(extra=0, **options):
  """A picture in ten scans, and the last of them some more times."""
  image = fake_data.noise(0, 40, 60)
  encoded = fake_data.encode(image, "JPEG", progressive=True, **options)
  last = encoded[encoded.rindex(SCAN) : -2]
  return encoded[:-2] + last * extra + END


def test_scans_of_what_pillow_writes():
  plain = fake_data.encode(fake_data.noise(0), "JPEG")
  assert scans(plain) == 1
  assert scans(progressive()) == 10
  assert scans(progressive(restart_marker_blocks=2)) == 10
  assert scans(progressive(extra=50)) == 60


@pytest.mark.fault("slow-image")
def test_bytes_that_only_look_like_scans_do_not_count():
  """In a comment, in a preview inside of EXIF, behind the end."""
  exif = b"Exif\0\0" + progressive(extra=300)[:60_000]
  comment = SCAN * 500
  encoded = progressive(exif=exif, comment=comment) + progressive(extra=300)
  assert scans(encoded) == 10


def test_filling_and_odd_lengths_hide_no_scan():
  """Decoders skip 0xFF before a marker, and nothing for a length below 2."""
  header, scan = progressive().split(SCAN, 1)
  for between in (
    b"",
    b"\xff" * 9,
    b"\xff" * 200_000,
    b"\xff\xd3",
    b"\xff\0",
    b"junk",
  ):
    encoded = header + between + SCAN + scan
    assert scans(encoded) == 10
  for length in (b"\0\0", b"\0\1", b"\0\2"):
    encoded = header + b"\xff\xfe" + length + SCAN + scan
    assert scans(encoded) == 10


@pytest.mark.parametrize(
  ("content", "problem"),
  [
    (b"", ""),
    (b"\xff" * 10_000, ""),
    (b"\xff\0" * 10_000, ""),
    (b"\xff\xd0" * 10_000, ""),
    (SCAN, ""),
    (SCAN + b"\xff\xff", ""),
    (b"\xff\xfe\0\2" * 20_000, "more than 10,000 segments"),
    ((SCAN + b"\0\2") * 65, "more than 64 scans"),
  ],
)
def test_jpeg_garbage_ends_the_outline(content, problem):
  refused = contextlib.nullcontext()
  if problem:
    refused = pytest.raises(DataError, match=problem)
  with refused:
    assert not jpeg.outline(jpeg.MAGIC[:2] + content).ended

"""Files that would take long to decode are refused before they are decoded."""

import bisect
import gc
import io
import os
import struct
import sys
import threading
import time
import zlib

import numpy as np
import pytest
from fake_data import encode, noise
from PIL import Image

from memory_vit.errors import DataError
from memory_vit.images import decoding, preparation
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.images.reader import ImageReader
from memory_vit.model.task import EvalPreprocessing

EVALUATION = EvalPreprocessing(image_size=8)
END = b"\xff\xd9"


def prepare(image):
  """As `predict`, `embed` and the server do."""
  return preparation.prepare_image(image, EVALUATION, MemoryLimit(2**31))


def progressive(scans, image=None):
  encoded = encode(
    noise(0) if image is None else image, "JPEG", progressive=True
  )
  last = encoded[encoded.rindex(b"\xff\xda") : -2]
  return encoded[:-2] + last * (scans - 10) + END


def png_with(chunks, kind):
  """A PNG with so many empty chunks in front of its data, or among them."""
  rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise(0)))
  header = struct.pack(">IIBBBBB", 30, 20, 8, 2, 0, 0, 0)

  def chunk(kind, content=b""):
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check

  return b"".join([
    b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header),
    chunk(b"IDAT", rows[:9]) if kind == b"IDAT" else b"",
    chunk(kind) * chunks,
    chunk(b"IDAT", rows[9:] if kind == b"IDAT" else rows), chunk(b"IEND"),
  ])  # fmt: skip


def gif_with(comments):
  encoded = encode(Image.fromarray(noise(0)).convert("L"), "GIF")
  start = encoded.index(b",", 13 + (3 << (encoded[10] & 7) + 1))
  return encoded[:start] + b"!\xfe\1a\0" * comments + encoded[start:]


def run_length_bmp(width, height, runs=b""):
  """A BMP of rows of one colour, and of runs of nothing in front of them."""
  palette = bytes(4 * 256)
  body = runs + bytes([width, 7, 0, 0]) * height + b"\0\1"
  start = 54 + len(palette)
  return (
    b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start)
    + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body),
                  1, 1, 256, 0)
    + palette + body
  )  # fmt: skip


SCREEN = (4320, 7680)
ORDINARY = {
  # As phones and cameras write them, at their largest.
  "64 megapixels": lambda: progressive(10, np.zeros((8000, 8000, 3), "u1")),
  "24 megapixels": lambda: progressive(15, np.zeros((4000, 6000, 3), "u1")),
  "a screen": lambda: encode(np.zeros((*SCREEN, 3), "u1"), "PNG"),
  "1 megapixel of 64 scans": lambda: progressive(64, noise(0, 1000, 1000)),
  "a large profile": lambda: encode(
    noise(0), "JPEG", icc_profile=bytes(2**20), comment=bytes(9)
  ),
  "64 MiB in chunks of 8 KiB": lambda: png_with(8_192, b"IDAT"),
  "a run-length BMP": lambda: run_length_bmp(200, 10_000),
}


@pytest.mark.fault("slow-image")
@pytest.mark.slow
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_are_taken(name):
  assert prepare(ORDINARY[name]()).shape == (8, 8, 3)


@pytest.mark.fault("slow-image")
def test_progressive_jpeg_costs_scans_times_pixels(monkeypatch):
  """The largest images may have the scans of usual encoders, not more."""
  encoded = progressive(24)
  monkeypatch.setattr(decoding, "MAX_PIXELS", 2 * 20 * 30)
  assert decoding.pixels_claimed(encoded) == 2 * 20 * 30
  prepare(encoded)
  monkeypatch.setattr(decoding, "MAX_PIXELS", 2 * 20 * 30 - 1)
  assert decoding.pixels_claimed(encoded) == len(encoded) // 3
  with pytest.raises(
    DataError, match="megapixels, the limit for a JPEG of 24 scans"
  ):
    prepare(encoded)
  prepare(progressive(12))


def test_64_megapixels_of_63_scans_are_refused_at_once():
  encoded = progressive(63)
  start = encoded.index(b"\xff\xc2") + 5
  large = (
    encoded[:start] + struct.pack(">HH", 8000, 8000) + encoded[start + 4 :]
  )
  begun = time.process_time()
  with pytest.raises(DataError, match="8000 x 8000 pixels, more than 12.2"):
    prepare(large)
  assert time.process_time() - begun < 0.5


def test_jpeg_with_much_filling_is_refused():
  """But not where a scan may have it, or other bytes without a marker."""
  encoded = encode(noise(0), "JPEG")
  prepare(encoded[:2] + b"\xff" * (2**18 - 1) + encoded[2:])
  scan = encoded.index(b"\xff\xda")
  for start in (2, scan):
    filled = encoded[:start] + b"\xff" * 2**18 + encoded[start:]
    with pytest.raises(DataError, match="more than 256 KiB of fill bytes"):
      prepare(filled)
  prepare(encoded[:-2] + b"\xff" * 2**20 + END)


def test_arithmetic_coding_is_refused():
  encoded = progressive(10).replace(b"\xff\xc2", b"\xff\xca")
  with pytest.raises(DataError, match="arithmetic coding, expected Huffman"):
    prepare(encoded)


def test_pillow_never_reads_the_header_of_a_jpeg(monkeypatch, tmp_path):
  """It takes 2 s for 1 MiB of fill bytes, and squares what EXIF has."""
  monkeypatch.setattr(Image, "open", None)
  encoded = encode(noise(0), "JPEG")
  inks = encode(Image.fromarray(noise(0)).convert("CMYK"), "JPEG")
  for whole in (encoded, inks):
    filled = whole[:2] + b"\xff" * 200_000 + whole[2:]
    (tmp_path / "a").write_bytes(filled)
    found = prepare(str(tmp_path / "a"))
    assert np.array_equal(found, prepare(filled))


@pytest.mark.fault("slow-image")
@pytest.mark.parametrize(
  ("encoded", "reads"),
  [
    (png_with(300, b"teST"), 2 * 300),
    (png_with(300, b"IDAT"), 2 * 300),
    (gif_with(300), 5 * 300),
    (run_length_bmp(30, 20, b"\1\0" * 300), 2 * 300),
  ],
  ids=["chunks", "data chunks", "comments", "runs"],
)
def test_pieces_are_counted_while_they_are_read(monkeypatch, encoded, reads):
  """About so many reads are needed, and with one fewer it is refused."""

  def is_taken(most):
    monkeypatch.setattr(decoding, "MAX_READS", most)
    monkeypatch.setattr(decoding, "_MAX_READS_OF_RUNS", most)
    try:
      prepare(encoded)
    except DataError:
      return False
    return True

  needed = bisect.bisect_left(range(4 * reads), True, key=is_taken)
  assert reads <= needed < reads + 100
  assert is_taken(needed)
  monkeypatch.setattr(decoding, "MAX_READS", needed - 1)
  monkeypatch.setattr(decoding, "_MAX_READS_OF_RUNS", needed - 1)
  with pytest.raises(DataError, match="chunks or blocks: they take more"):
    prepare(encoded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [b"teST", b"IDAT"])
def test_hundreds_of_thousands_of_chunks_are_refused_quickly(kind):
  encoded = png_with(200_000, kind)
  begun = time.process_time()
  with pytest.raises(DataError, match="more than 50,000 reads"):
    prepare(encoded)
  assert time.process_time() - begun < 3


def test_a_run_length_bmp_is_taken_up_to_a_quarter_of_the_pixels(monkeypatch):
  encoded = run_length_bmp(30, 20)
  monkeypatch.setattr(decoding, "MAX_PIXELS", 4 * 30 * 20)
  prepare(encoded)
  assert decoding.pixels_claimed(encoded) == 4 * 30 * 20
  monkeypatch.setattr(decoding, "MAX_PIXELS", 4 * 30 * 20 - 1)
  with pytest.raises(
    DataError, match="megapixels, the limit for a run-length BMP"
  ):
    prepare(encoded)
  prepare(encode(noise(0), "BMP"))


def header_only_png(depth, colours, interlaced):
  header = struct.pack(">IIBBBBB", 30, 20, depth, colours, 0, 0, interlaced)
  encoded = png_with(0, b"teST")
  check = struct.pack(">I", zlib.crc32(b"IHDR" + header))
  return encoded[:16] + header + check + encoded[33:]


RGBA = Image.new("RGBA", (30, 20))


@pytest.mark.fault("slow-image")
@pytest.mark.parametrize(
  ("encoded", "weight"),
  [
    (encode(RGBA.convert("RGB"), "PNG"), 1),
    (encode(RGBA.convert("RGB"), "WEBP"), 1),
    (encode(RGBA, "PNG"), 1.4),
    (encode(RGBA, "WEBP"), 1.4),
    (encode(RGBA.convert("LA"), "PNG"), 1.4),
    (header_only_png(16, 2, 0), 1.2),
    (header_only_png(8, 2, 1), 1.2),
    (header_only_png(16, 6, 1), 1.4 * 1.2 * 1.2),
  ],
  ids=["PNG", "WebP", "alpha", "WebP alpha", "grey alpha", "16 bits",
       "interlaced", "all three"],
)  # fmt: skip
def test_pixels_that_take_longer_count_more(monkeypatch, encoded, weight):
  """For what waits for what; a large photograph is taken nevertheless."""
  assert decoding.pixels_claimed(encoded) == int(600 * weight)
  filled = encoded + bytes(9_000)
  assert decoding.pixels_claimed(filled) == len(filled) // 3
  monkeypatch.setattr(decoding, "MAX_PIXELS", 600)
  assert decoding.pixels_claimed(encoded) == int(600 * weight)


@pytest.mark.fault("many-pixels")
@pytest.mark.parametrize(
  "encoded",
  [gif_with(60_000), bytes(9_000), encode(noise(0, 40, 40), "PNG")[:-900]],
  ids=["too many blocks", "no image", "cut"],
)
def test_files_that_are_refused_count_their_bytes(encoded):
  """With a weight of 0 they would go before all ordinary images."""
  with pytest.raises(DataError):
    decoding.decode(encoded)
  assert decoding.pixels_claimed(encoded) >= len(encoded) // 3 > 0


def test_damage_is_decoded_once(monkeypatch):
  """A stranger could make any file cost three times as much."""
  encoded = bytearray(encode(noise(0, 40, 40), "JPEG"))
  encoded[700:720] = range(20)
  calls, real = [], decoding.simplejpeg.decode_jpeg

  def counted(*args, **options):
    calls.append(1)
    return real(*args, **options)

  monkeypatch.setattr(decoding.simplejpeg, "decode_jpeg", counted)
  prepare(bytes(encoded))
  assert len(calls) == 1
  with pytest.raises(DataError, match="its end is missing"):
    prepare(progressive(10)[:-2])


def test_a_refused_file_is_forgotten():
  """At once, not when garbage is collected: it may have 64 MiB."""
  encoded = png_with(300, b"teST")[:-2000] + bytes(9)
  reader = ImageReader(64, 1, 8)
  gc.disable()
  try:
    before = sys.getrefcount(encoded)
    [error] = reader.each([encoded], EVALUATION)
    assert isinstance(error, DataError)
    time.sleep(0.05)  # until the thread waits again
    assert sys.getrefcount(encoded) == before
  finally:
    gc.enable()


# Large images, and others.


@pytest.fixture
def held(monkeypatch):
  """Large images are decoded until this event is set."""
  event, real = threading.Event(), decoding.decode

  def slow(encoded):
    found = real(encoded)
    if found.size >= 3 * decoding.LARGE_PIXELS:
      assert event.wait(30)
    return found

  monkeypatch.setattr(decoding, "LARGE_PIXELS", 40 * 40)
  monkeypatch.setattr(decoding, "decode", slow)
  yield event
  event.set()


def test_small_images_do_not_wait_for_large_ones(held):
  """Neither for threads, nor for memory."""
  large, small = encode(noise(0, 40, 40), "PNG"), encode(noise(1), "PNG")
  reader = ImageReader(64, 1, 8)
  room = preparation.bytes_needed(io.BytesIO(large), EVALUATION) + len(large)
  reader._memory = MemoryLimit(3 * room // 2, spare=room // 2)
  several = [large] * (2 * os.cpu_count())
  waiting = threading.Thread(target=reader.each, args=(several, EVALUATION))
  waiting.start()
  try:
    begun = time.monotonic()
    [found] = reader.each([small], EVALUATION)
    assert found.shape == (8, 8, 3)
    assert time.monotonic() - begun < 10
    assert waiting.is_alive()
  finally:
    held.set()
    waiting.join()


def test_memory_is_spared_for_small_images(held):
  """One that needs all of the memory is decoded, too, while nothing else is."""
  limit = MemoryLimit(100, spare=10)
  order = []

  def take(size):
    with limit.taken(size):
      order.append(size)

  with limit.taken(80):
    waiting = threading.Thread(target=take, args=(11,))
    waiting.start()
    time.sleep(0.1)
    take(10)
  waiting.join()
  take(100)
  assert order == [10, 11, 100]


def test_small_requests_for_memory_are_woken():
  """One who waits for more must not swallow what would be enough for them."""
  limit, done = MemoryLimit(10), threading.Event()

  def take(size, taken=None):
    with limit.taken(size):
      if taken:
        taken.set()

  first, second = limit.taken(6), limit.taken(4)
  first.__enter__()
  second.__enter__()
  for given in ((9,), (3, done)):
    threading.Thread(target=take, args=given, daemon=True).start()
    time.sleep(0.2)
  second.__exit__(None, None, None)
  woken = done.wait(2)
  first.__exit__(None, None, None)
  assert woken

"""Files of pictures that somebody names: found, guarded, read.

What cannot be read does not end the reading of others: it says why.
"""

import contextlib
import dataclasses
import io
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf
from PIL import Image

from memory_vit import image_ops
from memory_vit.errors import DataError
from memory_vit.sources import SUFFIXES, reason_of
from memory_vit.tasks import EvalPreprocessing

# A picture beyond any of these is refused before it is decoded: a file of a few
# kilobytes can claim to be a picture that fills the memory. A pixel takes 3
# bytes while a JPEG or PNG is decoded, up to 21 of a WebP, and a thread each
# may do so. 64 megapixels are those of the largest common cameras.
MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 64_000_000
MAX_SIDE = 16_384

# Those that `image_ops.decode` takes.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
# Each thread may hold a picture of MAX_PIXELS.
THREADS = min(8, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Entry:
  """A picture that was asked for.

  Attributes:
    path: of the file.
    reason: why it cannot be read; "" where nothing is known against it.
  """

  path: str
  reason: str = ""


@dataclasses.dataclass(frozen=True, eq=False)  # it holds an array
class Picture:
  """A picture that was tried.

  Attributes:
    entry: says why where it could not be read.
    pixels: float32 (s, s, 3) in [-1, 1]; None where it could not be read.
  """

  entry: Entry
  pixels: np.ndarray | None


def find_pictures(arguments: Iterable[str]) -> Iterator[Entry]:
  """The pictures that were asked for, one by one.

  Args:
    arguments: files; folders, which stand for all pictures below them, sorted;
      and "-" for paths on standard input, read as they are asked for.
  """
  for argument in arguments:
    if argument == "-":
      for line in sys.stdin.buffer:
        path = os.fsdecode(line.rstrip(b"\r\n"))
        if path:
          yield from _below(path)
    else:
      yield from _below(argument)


def _below(path: str) -> Iterator[Entry]:
  """A file itself, or the pictures in a folder."""
  if not os.path.isdir(path):
    yield Entry(path)
    return
  suffixes = (*SUFFIXES, ".gif")
  found, closed = [], []
  for folder, folders, files in os.walk(path, onerror=closed.append):
    folders[:] = [name for name in folders if not name.startswith(".")]
    found += [
      os.path.join(folder, name)
      for name in files
      if name.lower().endswith(suffixes) and not name.startswith(".")
    ]
  yield from (Entry(os.fspath(e.filename), str(e.strerror)) for e in closed)
  if not found and not closed:
    yield Entry(path, f"a folder without pictures ({', '.join(suffixes)})")
  yield from map(Entry, sorted(found))


def read_batches(
  entries: Iterable[Entry], evaluation: EvalPreprocessing, size: int
) -> Iterator[list[Picture]]:
  """Reads pictures, `size` at a time (fewer at the end), in order.

  Args:
    entries: are asked for no earlier than needed.
    evaluation: how pictures are prepared.
    size: of a batch.
  """
  read = _reader(evaluation)
  entries = iter(entries)
  with ThreadPoolExecutor(THREADS) as pool:
    while batch := list(itertools.islice(entries, size)):
      yield list(pool.map(read, batch))


def _reader(evaluation: EvalPreprocessing) -> Callable[[Entry], Picture]:
  """Returns what reads a picture, the way `data.eval_batches` does."""

  def read(entry: Entry) -> Picture:
    if entry.reason:
      return Picture(entry, None)
    try:
      encoded = file_content(entry.path)
      return Picture(entry, prepare_encoded(encoded, evaluation))
    except DataError as error:
      return Picture(Entry(entry.path, str(error)), None)

  return read


def prepare_encoded(
  encoded: bytes, evaluation: EvalPreprocessing
) -> np.ndarray:
  """Decodes a picture that nobody vouches for, as evaluation does.

  Args:
    encoded: content of a file.
    evaluation: how it is prepared; s is its `image_size`.

  Returns:
    float32 (s, s, 3) in [-1, 1].

  Raises:
    DataError: says why not.
  """
  _check_header(encoded)
  with _named_reasons():
    # Eagerly: a tf.function rounds otherwise than tf.data, in the last bit.
    return image_ops.eval_image(tf.constant(encoded), evaluation).numpy()


def prepare_pixels(
  pixels: np.ndarray, evaluation: EvalPreprocessing
) -> np.ndarray:
  """The same of a picture that has been decoded, uint8 (height, width, 3)."""
  with _named_reasons():
    return image_ops.eval_view(tf.constant(pixels), evaluation).numpy()


@contextlib.contextmanager
def _named_reasons() -> Iterator[None]:
  """Errors of TensorFlow as ours."""
  try:
    yield
  except tf.errors.OpError as error:
    raise DataError(reason_of(error)) from error


def file_content(path: str) -> bytes:
  """Reads a file that is not too large.

  Raises:
    DataError: says why not.
  """
  try:
    # Opening a pipe would wait for somebody to write into it.
    if not stat.S_ISREG(os.stat(path).st_mode):
      raise DataError("not a file")
    with open(path, "rb") as file:
      encoded = file.read(MAX_FILE_BYTES + 1)
  except OSError as error:
    raise DataError(error.strerror or str(error)) from error
  except ValueError as error:  # A name with a zero byte.
    raise DataError(str(error)) from error
  if len(encoded) > MAX_FILE_BYTES:
    raise DataError(f"the file has more than {MAX_FILE_BYTES / 2**20:g} MiB")
  return encoded


def _check_header(encoded: bytes) -> None:
  """Refuses what is no picture, or too large a one; decodes nothing.

  Raises:
    DataError: says why.
  """
  limit = f"more than {MAX_PIXELS / 1e6:g} megapixels"
  try:
    with Image.open(io.BytesIO(encoded), formats=_FORMATS) as image:
      width, height = image.size
  except Image.DecompressionBombError as error:  # From 179 megapixels on.
    raise DataError(limit) from error
  except Image.UnidentifiedImageError as error:
    raise DataError("not a JPEG, PNG, WebP, BMP or GIF file") from error
  except Exception as error:  # Pillow raises many kinds on broken files.
    raise DataError(f"broken: {error or type(error).__name__}") from error
  if width * height > MAX_PIXELS:
    raise DataError(f"{width} x {height} pixels, {limit}")
  if max(width, height) > MAX_SIDE:
    raise DataError(
      f"{width} x {height} pixels, a side of more than {MAX_SIDE}"
    )

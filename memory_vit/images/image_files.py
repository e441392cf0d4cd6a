"""Find, check and read image files that a user names.

A file that cannot be read does not keep others from being read.
"""

import collections
import contextlib
import dataclasses
import io
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import jax
import numpy as np
from PIL import Image, UnidentifiedImageError

from memory_vit.errors import ConfigError, DataError
from memory_vit.images import decoding, folders, view
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.model.task import EvalPreprocessing

# A larger file is not read; how many pixels it may have `decoding` says.
MAX_FILE_BYTES = 64 * 2**20

# So much of a file nearly always has its header.
_HEAD = 2**18

# Those that `decode` takes, with the bytes that a pixel takes while it is
# decoded, at most: measured, and rounded up.
_BYTES_PER_PIXEL = {"JPEG": 14, "PNG": 14, "WEBP": 24, "BMP": 12, "GIF": 12}
# While a batch is made: the images one by one, side by side, filled up to the
# size of a batch, and on the device, each as float32. Of one that is read
# ahead, the images one by one.
COPIES_OF_A_BATCH = 4
THREADS = min(8, os.cpu_count() or 1)
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Entry:
  """An image file to read; `reason` says why it cannot be read, or is ""."""

  path: str
  reason: str = ""


@dataclasses.dataclass(frozen=True, eq=False)  # it holds an array
class LoadedImage:
  """An image, float32 (side, side, 3) in [-1, 1]; None if it was skipped."""

  entry: Entry
  pixels: np.ndarray | None


def find_images(arguments: Iterable[str]) -> Iterator[Entry]:
  """Yield the image files that are asked for.

  Args:
    arguments: files; folders, which stand for all images below them, sorted
      (see `folders`); and "-" for paths on standard input, read as they are
      asked for.
  """
  for argument in arguments:
    if argument == "-":
      for line in sys.stdin.buffer:
        if path := os.fsdecode(line.rstrip(b"\r\n")):
          yield from _below(path)
    else:
      yield from _below(argument)


def _below(path: str) -> Iterator[Entry]:
  """A file itself, or the images in a folder."""
  if not os.path.isdir(path):
    yield Entry(path)
    return
  found = folders.walk(path)
  entries = entries_of(found)
  if not entries:
    suffixes = ", ".join(folders.SUFFIXES)
    entries = [Entry(path, f"a folder without images ({suffixes})")]
  yield from entries


def entries_of(found: folders.Walk) -> list[Entry]:
  """Folders that cannot be listed, and then the images of a walk."""
  closed = [Entry(*item) for item in sorted(found.closed.items())]
  return closed + [Entry(path) for path in found.images]


def read_batches(
  entries: Iterable[Entry],
  evaluation: EvalPreprocessing,
  size: int,
  memory_mib: int,
  *,
  ahead: bool = False,
) -> Iterator[list[LoadedImage]]:
  """Read images, `size` at a time (fewer at the end), in order.

  Args:
    entries: are asked for no earlier than needed.
    evaluation: how images are prepared.
    size: of a batch.
    memory_mib: what a batch, and the images that are decoded for it, may
      take together; some wait for others, and one that alone needs more is
      refused.
    ahead: whether the next batch is read while one is used; it counts then as
      well.

  Raises:
    ConfigError: where there is no room for a batch.
  """
  left = room_for_decoding(evaluation, size, memory_mib, ahead=ahead)
  reader = _ImageReader(evaluation, left)
  entries = iter(entries)
  with ThreadPoolExecutor(THREADS) as pool:
    begun: collections.deque[Iterator[LoadedImage]] = collections.deque()
    try:
      while batch := list(itertools.islice(entries, size)):
        begun.append(pool.map(reader.read, batch))
        if len(begun) > ahead:
          yield list(begun.popleft())
      yield from map(list, begun)
    finally:  # nobody waits for what is not begun
      pool.shutdown(wait=False, cancel_futures=True)


def room_for_decoding(
  evaluation: EvalPreprocessing, size: int, memory_mib: int, *, ahead: bool
) -> int:
  """Bytes that batches of images leave for those that are decoded.

  The arguments are those of `read_batches`.

  Raises:
    ConfigError: where there is no room for a batch.
  """
  pixels = size * evaluation.image_size**2
  left = memory_mib * _MIB - (COPIES_OF_A_BATCH + ahead) * pixels * 3 * 4
  if left <= 0:
    raise ConfigError(
      f"{size} images of {evaluation.image_size} pixels a side do not fit "
      f"into {memory_mib} MiB: expected a smaller --batch_size, or a larger "
      "--memory_mib."
    )
  return left


class _ImageReader:
  """Reads images in several threads."""

  def __init__(self, evaluation: EvalPreprocessing, memory: int) -> None:
    self._evaluation = evaluation
    self._memory = MemoryLimit(memory)

  def read(self, entry: Entry) -> LoadedImage:
    """Read an image, or note why it cannot be read."""
    if entry.reason:
      return LoadedImage(entry, None)
    try:
      prepared = prepare_file(entry.path, self._evaluation, self._memory)
      return LoadedImage(entry, prepared)
    except DataError as error:
      return LoadedImage(Entry(entry.path, str(error)), None)


def prepare_file(
  path: str, evaluation: EvalPreprocessing, memory: MemoryLimit | None = None
) -> np.ndarray:
  """`prepare_encoded` of a file, which is read once there is memory for it.

  Raises:
    DataError: says why not.
  """
  with _opened(path) as file:
    size = _size_of(file)
    needed = _needed(file, evaluation, memory)
    # As it lies in the file, and what Pillow has read of it.
    with _taken(2 * size + needed, memory):
      file.seek(0)
      return _decoded(file.read(size), evaluation)


def prepare_encoded(
  encoded: bytes,
  evaluation: EvalPreprocessing,
  memory: MemoryLimit | None = None,
) -> np.ndarray:
  """Decode an untrusted image file, and prepare it for evaluation.

  Args:
    encoded: the file.
    evaluation: how.
    memory: that threads share, where several decode at the same time.

  Returns:
    float32 (side, side, 3) in [-1, 1]; side is `evaluation.image_size`.

  Raises:
    DataError: says why not.
  """
  if len(encoded) > MAX_FILE_BYTES:
    raise DataError(f"it has more than {MAX_FILE_BYTES / 2**20:g} MiB")
  needed = _needed(io.BytesIO(encoded), evaluation, memory)
  # Pillow keeps a copy of the file.
  with _taken(len(encoded) + needed, memory):
    return _decoded(encoded, evaluation)


def prepare_pixels(
  pixels: np.ndarray | jax.Array,
  evaluation: EvalPreprocessing,
  memory: MemoryLimit | None = None,
) -> np.ndarray:
  """Prepare decoded pixels for evaluation.

  Args:
    pixels: of `decoding.rgb_pixels`.
    evaluation: how.
    memory: see `prepare_encoded`.

  Raises:
    DataError: for other shapes and types, and what takes too much memory.
  """
  decoding.require_pixels(pixels)
  height, width = pixels.shape[:2]
  # A copy from a device, and one with three channels.
  needed = pixels.size + 3 * height * width
  needed += view.view_bytes(height, width, evaluation)
  with _taken(needed, memory):
    return view.eval_view(decoding.rgb_pixels(np.asarray(pixels)), evaluation)


def _needed(
  file: BinaryIO, evaluation: EvalPreprocessing, memory: MemoryLimit | None
) -> int:
  """`bytes_needed`, in one thread at a time of those that share memory."""
  with memory.header if memory else contextlib.nullcontext():
    return bytes_needed(file, evaluation)


def _taken(
  size: int, memory: MemoryLimit | None
) -> contextlib.AbstractContextManager[None]:
  """Take memory, where there is a limit."""
  return memory.taken(size) if memory else contextlib.nullcontext()


def _size_of(file: BinaryIO) -> int:
  size = os.fstat(file.fileno()).st_size
  if size > MAX_FILE_BYTES:
    raise DataError(f"the file has more than {MAX_FILE_BYTES / 2**20:g} MiB")
  return size


def _decoded(encoded: bytes, evaluation: EvalPreprocessing) -> np.ndarray:
  """Decode an image whose header has been checked."""
  return view.eval_view(decoding.decode(encoded), evaluation)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
  """Open a regular file, or raise a `DataError` that says why not."""
  try:
    # Opening a pipe would wait for somebody to write into it.
    if not stat.S_ISREG(os.stat(path).st_mode):
      raise DataError("not a file")
    with open(path, "rb") as file:
      yield file
  except DataError:
    raise
  except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
    raise DataError(getattr(error, "strerror", None) or str(error)) from error


def bytes_needed(file: BinaryIO, evaluation: EvalPreprocessing) -> int:
  """Bytes that preparing an image takes, by its header; nothing is decoded.

  Raises `DataError` for what is no image, or too large.
  """
  try:
    try:
      kind, width, height = decoding.header(file.read(_HEAD))
    except Exception:  # of a WebP, or behind a large profile
      file.seek(0)
      kind, width, height = decoding.header(file.read())
  except DataError:
    raise
  except Image.DecompressionBombError as error:  # From 179 megapixels on.
    raise DataError(decoding.TOO_LARGE) from error
  except UnidentifiedImageError as error:
    raise DataError("not a JPEG, PNG, WebP, BMP or GIF file") from error
  except Exception as error:  # Pillow raises many kinds on broken files.
    reason = str(error) or type(error).__name__
    raise DataError(f"broken: {reason}") from error
  decoding.require_size(width, height)
  decoded = width * height * _BYTES_PER_PIXEL[kind]
  return decoded + view.view_bytes(height, width, evaluation)

"""Prepare one image, given as a path, the bytes of a file, or pixels.

Before an image is decoded, the size in its header is checked, and memory for
decoding is reserved.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax
import numpy as np
from jaxtyping import Float32

from memory_vit.errors import DataError
from memory_vit.images import decoding, exif, view
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.model.task import EvalPreprocessing

# Maximum size of an image file; `decoding` limits the number of pixels.
MAX_FILE_BYTES = 64 * 2**20

# The header of nearly every file lies within this many bytes at the beginning.
_HEAD = 2**18

# {format: peak memory of decoding in bytes per pixel}, measured and rounded up.
_BYTES_PER_PIXEL = {"JPEG": 14, "PNG": 14, "WEBP": 24, "BMP": 12, "GIF": 12}

# An image is a path (str or PathLike), the bytes of a file, or pixels.
ImageLike = str | os.PathLike[str] | bytes | np.ndarray | jax.Array


def prepare_image(
  image: Any, preprocessing: EvalPreprocessing, memory: MemoryLimit
) -> Float32[np.ndarray, "side side 3"]:
  """Prepare an image for the model, in [-1, 1]; threads share `memory`.

  Raises `DataError` with a reason; callers must add the name of the image.
  """
  if isinstance(image, np.ndarray | jax.Array):
    return _prepare_pixels(image, preprocessing, memory)
  if isinstance(image, str | os.PathLike):
    return _prepare_file(os.fspath(image), preprocessing, memory)
  if not isinstance(image, bytes):
    raise DataError(
      "expected a path, the bytes of a file, or a uint8 array; for a Pillow "
      "image, give np.asarray(image.convert('RGB'))"
    )
  return _prepare_encoded(image, preprocessing, memory)


def image_name(image: Any) -> str:
  """Return the name of an image in errors."""
  if isinstance(image, str | os.PathLike):
    return repr(os.fspath(image))
  if isinstance(image, np.ndarray | jax.Array):
    return f"{image.dtype} {image.shape}"
  if isinstance(image, bytes):
    return f"of {len(image)} bytes"
  return f"of type {type(image).__name__}"


def read_file(path: str | os.PathLike[str]) -> bytes:
  """Return the bytes of an image file; raise `DataError` if reading fails."""
  with _opened(os.fspath(path)) as file:
    return file.read(_size_of(file))


def _prepare_file(
  path: str, preprocessing: EvalPreprocessing, memory: MemoryLimit
) -> np.ndarray:
  """Prepare an image file; wait for free memory before reading the file."""
  with _opened(path) as file:
    size = _size_of(file)
    needed = _needed(file, preprocessing, memory)
    # The file and Pillow's copy of the file take `size` bytes each.
    with memory.taken(2 * size + needed):
      file.seek(0)
      return _decoded(file.read(size), preprocessing)


def _prepare_encoded(
  encoded: bytes, preprocessing: EvalPreprocessing, memory: MemoryLimit
) -> np.ndarray:
  """Decode an untrusted image file, and prepare it for evaluation."""
  if len(encoded) > MAX_FILE_BYTES:
    raise DataError(f"the file has more than {MAX_FILE_BYTES / 2**20:g} MiB")
  needed = _needed(io.BytesIO(encoded), preprocessing, memory)
  # `encoded` is already in memory, so count only Pillow's copy of it.
  with memory.taken(len(encoded) + needed):
    return _decoded(encoded, preprocessing)


def _prepare_pixels(
  pixels: np.ndarray | jax.Array,
  preprocessing: EvalPreprocessing,
  memory: MemoryLimit,
) -> np.ndarray:
  """Prepare pixels of any shape that `rgb_pixels` can convert."""
  decoding.require_pixels(pixels)
  height, width = pixels.shape[:2]
  # Count a copy of the pixels on the host, and a copy with three channels.
  needed = pixels.size + 3 * height * width
  needed += view.view_bytes(height, width, preprocessing)
  with memory.taken(needed):
    return view.eval_view(
      decoding.rgb_pixels(np.asarray(pixels)), preprocessing
    )


def _needed(
  file: BinaryIO, preprocessing: EvalPreprocessing, memory: MemoryLimit
) -> int:
  """Call `bytes_needed`, but only in one thread at a time."""
  with memory.header:
    return bytes_needed(file, preprocessing)


def _size_of(file: BinaryIO) -> int:
  size = os.fstat(file.fileno()).st_size
  if size > MAX_FILE_BYTES:
    raise DataError(f"the file has more than {MAX_FILE_BYTES / 2**20:g} MiB")
  return size


def _decoded(encoded: bytes, preprocessing: EvalPreprocessing) -> np.ndarray:
  """Decode, rotate and prepare an image whose header has been checked."""
  pixels = exif.turned(decoding.decode(encoded), exif.orientation(encoded))
  return view.eval_view(pixels, preprocessing)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
  """Open a regular file; raise `DataError` with the reason if that fails."""
  try:
    # A pipe is refused before it is opened, because opening a pipe would block
    # until another process writes to it.
    if not stat.S_ISREG(os.stat(path).st_mode):
      raise DataError("not a regular file")
    with open(path, "rb") as file:
      yield file
  except DataError:
    raise
  except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
    raise DataError(getattr(error, "strerror", None) or str(error)) from error


def bytes_needed(file: BinaryIO, preprocessing: EvalPreprocessing) -> int:
  """Estimate how many bytes preparing an image takes, from its header."""
  head = file.read(_HEAD)
  try:
    kind, width, height = decoding.header(head)
  except DataError:
    # If a long color profile comes first, `head` may end before the width and
    # the height: read the whole file.
    kind, width, height = decoding.header(head + file.read())
  decoding.require_size(width, height)
  decoded = width * height * _BYTES_PER_PIXEL[kind]
  return decoded + view.view_bytes(height, width, preprocessing)

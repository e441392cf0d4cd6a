"""Encode arrays, Pillow images and files as strings, which sources decode."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from memory_vit.data import oriented, raw_images
from memory_vit.errors import DataError
from memory_vit.images import decoding, preparation
from memory_vit.runtime import messages

_CHANNELS = (1, 3, 4)
# Maximum length of a `bytes` object that may be a path instead of a file's
# content: TensorFlow passes paths to Python as `bytes`.
_PATH_BYTES = 1_000
_EXPECTED = (
  "expected a path, the bytes of a file, an image of Pillow, or pixels (h, w, "
  "3) or (h, w): integers from 0 to 255, or floating point from 0 to 1"
)


def encoded(image: Any) -> bytes:
  """Return the content of a file, or pixels as a string of `raw_images`.

  Files that EXIF says to turn are marked, except files in TensorFlow tensors.
  Errors begin with "its image".
  """
  if isinstance(image, Mapping):  # an image that Hugging Face did not decode
    image = image.get("bytes") or image.get("path")
  if isinstance(image, bytes):
    is_path = len(image) <= _PATH_BYTES and os.path.isfile(image)
    return oriented.mark(_content(os.fsdecode(image)) if is_path else image)
  if isinstance(image, str | os.PathLike):
    return oriented.mark(_content(image))
  try:
    if isinstance(image, Image.Image) and image.mode != "F":
      return raw_images.encode(decoding.rgb(image))
    pixels = np.asarray(image)
  except DataError:
    raise
  except Exception as error:  # errors of Pillow or of a tensor library
    raise DataError(
      f"its image is of type {type(image).__name__}, which cannot be read: "
      f"{messages.first_line(error)}"
    ) from error
  if pixels.ndim == 0 and isinstance(pixels.item(), str | bytes):
    return oriented.unmarked(encoded(pixels.item()))
  rows = pixels
  if pixels.ndim == 3 and _channels_first(pixels.shape, image):
    rows = np.moveaxis(pixels, 0, -1)
  fits = rows.ndim == 2 or (rows.ndim == 3 and rows.shape[2] in _CHANNELS)
  levels = _levels(rows) if fits and rows.size else None
  if levels is None:
    raise DataError(_refusal(image, pixels))
  return raw_images.encode(decoding.rgb_pixels(levels))


def _content(path: str | os.PathLike[str]) -> bytes:
  try:
    return preparation.read_file(path)
  except DataError as error:
    raise DataError(
      f"its image is the path {messages.brief(os.fspath(path))}: {error}"
    ) from error


def _channels_first(shape: tuple[int, ...], image: Any) -> bool:
  is_torch = type(image).__module__.startswith("torch")
  return is_torch or (shape[0] in _CHANNELS and shape[2] not in _CHANNELS)


def _levels(pixels: np.ndarray) -> np.ndarray | None:
  """Convert pixels to uint8; return None if their type or range is invalid."""
  if np.issubdtype(pixels.dtype, np.integer):
    return pixels.astype(np.uint8) if _within(pixels, 255) else None
  if np.issubdtype(pixels.dtype, np.floating) and _within(pixels, 1):
    return np.round(pixels * 255).astype(np.uint8)
  return None


def _within(pixels: np.ndarray, greatest: int) -> bool:
  return bool(pixels.min() >= 0 and pixels.max() <= greatest)


def _refusal(image: Any, pixels: np.ndarray) -> str:
  """Return an error text that describes a refused image and valid images."""
  message = (
    f"its image is of type {type(image).__name__}, shape {pixels.shape} and "
    f"dtype {pixels.dtype}"
  )
  if np.issubdtype(pixels.dtype, np.number) and pixels.size:
    message += f", with values from {pixels.min():g} to {pixels.max():g}"
  advice = ""
  if pixels.ndim == 4:
    advice = ". It is a batch: give single images; tf.data has `unbatch()`"
  elif np.issubdtype(pixels.dtype, np.floating):
    advice = (
      ". Convert values from 0 to 255 by x / 255, and values from -1 to 1, as "
      "mv.preprocess returns, by (x + 1) / 2"
    )
  return f"{message}: {_EXPECTED}{advice}"

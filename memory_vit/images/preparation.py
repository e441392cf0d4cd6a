"""Prepare one image: a path, the bytes of a file, or pixels."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from memory_vit.errors import DataError
from memory_vit.images import image_files
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.model.task import EvalPreprocessing

# A file, the content of one, or pixels.
ImageLike = str | os.PathLike[str] | bytes | np.ndarray | jax.Array
# The same, as isinstance takes it.
ONE_IMAGE = (str, os.PathLike, bytes, np.ndarray, jax.Array)


def prepare_image(
  image: Any, evaluation: EvalPreprocessing, memory: MemoryLimit | None = None
) -> Float32[np.ndarray, "side side 3"]:
  """Prepare an image for the model.

  Args:
    image: a path, the bytes of a file, or uint8 pixels; anything else is
      refused.
    evaluation: how; side is its `image_size`.
    memory: that threads share, where several decode at the same time.

  Raises:
    DataError: says why not; the caller knows which image it was.
  """
  if isinstance(image, np.ndarray | jax.Array):
    return image_files.prepare_pixels(image, evaluation, memory)
  if isinstance(image, str | os.PathLike):
    return image_files.prepare_file(os.fspath(image), evaluation, memory)
  if not isinstance(image, bytes):
    raise DataError(
      "expected a path, the bytes of a file, or a uint8 array; of an image of "
      "Pillow, np.asarray(image.convert('RGB'))"
    )
  return image_files.prepare_encoded(image, evaluation, memory)


def image_name(image: Any) -> str:
  """Name of an image in a message."""
  if isinstance(image, str | os.PathLike):
    return repr(os.fspath(image))
  if isinstance(image, np.ndarray | jax.Array):
    return f"{image.dtype} {image.shape}"
  if isinstance(image, bytes):
    return f"of {len(image)} bytes"
  return f"of type {type(image).__name__}"

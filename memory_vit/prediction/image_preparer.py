"""Prepare images in threads, within a limit of memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from memory_vit.errors import ConfigError, DataError
from memory_vit.images.image_files import THREADS
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.images.preparation import (
  ONE_IMAGE,
  ImageLike,
  image_name,
  prepare_image,
)
from memory_vit.model.task import EvalPreprocessing
from memory_vit.tasks import image_check

Images = ImageLike | Iterable[ImageLike]
_MIB = 2**20
# While a batch is made: the images one by one, side by side, and on the device.
_COPIES_OF_A_BATCH = 3


class ImagePreparer:
  """Decodes and prepares images in threads that all callers share."""

  def __init__(self, memory_mib: int, batch_size: int, side: int) -> None:
    """Share `memory_mib` among all that is decoded at the same time.

    Args:
      memory_mib: what images and their decoding may take together.
      batch_size: of the largest batch.
      side: of the images that the model takes, in pixels.

    Raises:
      ConfigError: where there is no room for a batch.
    """
    batch = _COPIES_OF_A_BATCH * batch_size * side**2 * 3 * 4
    left = memory_mib * _MIB - batch
    if left <= 0:
      raise ConfigError(
        f"{batch_size} images of {side} pixels a side do not fit into "
        f"{memory_mib} MiB: expected smaller batch_sizes, or a larger "
        "memory_mib."
      )
    self._memory = MemoryLimit(left, "memory_mib")
    self._threads = ThreadPoolExecutor(THREADS, "memory_vit-images")

  def each(
    self, images: Images, evaluation: EvalPreprocessing, first: int = 0
  ) -> list[np.ndarray | DataError]:
    """Prepare images; in the place of a bad one there is its error.

    Args:
      images: one or several. Paths, bytes of files, uint8 pixels of any size,
        or what is prepared already: floats (side, side, 3) in [-1, 1].
      evaluation: how.
      first: number of the first image, for messages.

    Returns:
      For each image float32 (side, side, 3), or a `DataError` that names it.
    """

    def prepared(number: int, image: Any) -> np.ndarray | DataError:
      try:
        return self._prepared(image, evaluation)
      except DataError as error:
        named = f"image {number}, {image_name(image)}: {error}"
        return DataError(named)

    several = image_list(images)
    return list(self._threads.map(prepared, itertools.count(first), several))

  def _prepared(self, image: Any, evaluation: EvalPreprocessing) -> np.ndarray:
    if isinstance(image, np.ndarray | jax.Array) and np.issubdtype(
      image.dtype, np.floating
    ):
      return checked_pixels(np.asarray(image)[None], evaluation.image_size)[0]
    return prepare_image(image, evaluation, self._memory)


def checked_pixels(pixels: Any, side: int) -> np.ndarray:
  """Prepared images as float32 (k, side, side, 3).

  Raises:
    DataError: for another shape or type, and values outside [-1, 1] or that
      are not finite.
  """
  if not isinstance(pixels, np.ndarray | jax.Array):
    raise DataError(
      f"pixels are of type {type(pixels).__name__}, expected an array, from "
      "prepare."
    )
  array = np.asarray(pixels)
  image_check.require_shape(array, side)
  image_check.begin(array)()
  return array.astype(np.float32, copy=False)


def image_list(images: Images) -> list[Any]:
  """One image, or any collection of them -> a list.

  Raises:
    DataError: for a dictionary, or what is no collection.
  """
  if isinstance(images, np.ndarray | jax.Array) and (
    images.ndim == 4 or images.dtype.kind in "OSU"  # of bytes, or of paths
  ):
    return list(np.asarray(images))
  if isinstance(images, ONE_IMAGE):
    return [images]
  if isinstance(images, Mapping) or not isinstance(images, Iterable):
    raise DataError(
      f"images are of type {type(images).__name__}, expected an image or a "
      "list of them."
    )
  return list(images)

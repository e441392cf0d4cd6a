"""Prepare images in threads, within a limit of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from memory_vit.errors import ConfigError, DataError
from memory_vit.images import decoding
from memory_vit.images.image_files import COPIES_OF_A_BATCH, THREADS
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
# For images that are not large, which never wait for the memory of others.
_SPARE = 128 * _MIB


class ImagePreparer:
  """Decodes and prepares images in threads that all callers share."""

  def __init__(
    self,
    memory_mib: int,
    batch_size: int,
    side: int,
    *,
    copies: int = COPIES_OF_A_BATCH,
    option: str = "memory_mib",
  ) -> None:
    """Share `memory_mib` among batches and what is decoded for them.

    Args:
      memory_mib: what images and their decoding may take together.
      batch_size: of the largest batch.
      side: of the images that the model takes, in pixels.
      copies: of a batch that there are at the same time.
      option: who sets the memory, for messages.

    Raises:
      ConfigError: where there is no room for a batch.
    """
    left = memory_mib * _MIB - copies * batch_size * side**2 * 3 * 4
    if left <= 0:
      raise ConfigError(
        f"{copies} batches of {batch_size} images of {side} pixels a side do "
        f"not fit into {memory_mib} MiB: expected smaller batches, or a larger "
        f"{option}."
      )
    self._batch_size, self._side = batch_size, side
    self._memory = MemoryLimit(left, option, spare=min(left // 8, _SPARE))
    self._threads = ThreadPoolExecutor(THREADS, "memory_vit-images")
    # Of large ones at most so many are decoded together: others never wait.
    self._for_large = ThreadPoolExecutor(
      max(1, THREADS - 1), "memory_vit-large"
    )

  def batches(
    self, images: Images, evaluation: EvalPreprocessing
  ) -> Iterator[np.ndarray]:
    """Prepare images, a batch at a time; each when it is asked for.

    Yields:
      float32 (b, side, side, 3).

    Raises:
      DataError: for the first image that cannot be prepared; it names it.
    """
    several = image_list(images)
    for start in range(0, len(several), self._batch_size):
      part = several[start : start + self._batch_size]
      yield stacked(self.each(part, evaluation, start), self._side)

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

    several = image_list(images)
    found = self.each_unnamed(several, evaluation)
    return [
      DataError(f"image {number}, {image_name(image)}: {one}")
      if isinstance(one, DataError)
      else one
      for number, (image, one) in enumerate(
        zip(several, found, strict=True), first
      )
    ]

  def each_unnamed(
    self, images: Iterable[ImageLike], evaluation: EvalPreprocessing
  ) -> list[np.ndarray | DataError]:
    """`each`, of several images, with errors that name none of them."""

    def prepared(image: Any) -> np.ndarray | DataError:
      try:
        return self._prepared(image, evaluation)
      except DataError as error:
        return _without_frames(error)

    begun = [
      (self._for_large if _is_large(image) else self._threads).submit(
        prepared, image
      )
      for image in images
    ]
    return [one.result() for one in begun]

  def _prepared(self, image: Any, evaluation: EvalPreprocessing) -> np.ndarray:
    if isinstance(image, np.ndarray | jax.Array) and np.issubdtype(
      image.dtype, np.floating
    ):
      return checked_pixels(np.asarray(image)[None], evaluation.image_size)[0]
    return prepare_image(image, evaluation, self._memory)


def _without_frames(error: DataError) -> DataError:
  """Drop the traceback, whose frames hold the image."""
  alone = DataError(str(error))
  cause = error.__cause__
  if isinstance(cause, OSError):  # its number says whether it may pass
    alone.__cause__ = OSError(cause.errno, cause.strerror)
  return alone


def _is_large(image: Any) -> bool:
  """Whether an image file is small enough for the common threads."""
  if not isinstance(image, bytes):
    return False
  return decoding.pixels_claimed(image) >= decoding.LARGE_PIXELS


def stacked(found: list[np.ndarray | DataError], side: int) -> np.ndarray:
  """Prepared images as one array; the first error among them is raised."""
  pixels = []
  for image in found:
    if isinstance(image, DataError):
      raise image
    pixels.append(image)
  return np.stack(pixels) if pixels else np.zeros((0, side, side, 3), "f4")


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
  if isinstance(images, np.ndarray | jax.Array) and images.dtype.kind in "OSU":
    _require_list(images)
  if isinstance(images, np.ndarray | jax.Array) and (
    images.ndim == 4 or images.dtype.kind in "OU"  # of bytes, or of paths
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


def _require_list(images: np.ndarray | jax.Array) -> None:
  """Raise `DataError` for arrays that are no list of bytes, or of paths."""
  if images.dtype.kind == "S":
    raise DataError(
      f"images are an array of bytes of one length ({images.dtype}, kind 'S'), "
      "which loses zeros at their ends: expected np.array(images, "
      "dtype=object), or a list."
    )
  if images.ndim == 0:
    raise DataError(
      f"images are an array of {images.dtype} with no axis, expected an image "
      "or a list of them."
    )

"""Read images in threads that share a memory limit.

All images that users name are read here, except the images of data sets.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeGuard, TypeVar

import jax
import numpy as np

from memory_vit.errors import ConfigError, DataError
from memory_vit.images import decoding
from memory_vit.images.image_files import ImageFile
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.images.preparation import ImageLike, image_name, prepare_image
from memory_vit.model.task import EvalPreprocessing

THREADS = min(8, os.cpu_count() or 1)
Images = ImageLike | Iterable[ImageLike]
# A prepared image, float32 (side, side, 3) in [-1, 1], or the error that says
# why the image could not be prepared.
Prepared = np.ndarray | DataError
# While a batch is made, the batch exists up to four times as float32: as single
# images, as a stack of images, as the stack padded to the batch size, and as an
# array on the device. A batch that is read ahead exists only as single images.
COPIES_OF_A_BATCH = 4
_MIB = 2**20
# Bytes that large images must leave free, so that small images need not wait.
_SPARE = 128 * _MIB
K = TypeVar("K")


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared by ==
class LoadedImage:
  """An image file, and its prepared pixels.

  `pixels` are float32 (side, side, 3), or None if the file is unreadable.
  """

  entry: ImageFile
  pixels: np.ndarray | None


class ImageReader:
  """Decode and prepare images in threads that all callers share."""

  def __init__(
    self,
    memory_mib: int,
    batch_size: int,
    side: int,
    *,
    ahead: int = 0,
    option: str = "memory_mib",
    checked: Callable[[Any, int], np.ndarray] | None = None,
  ) -> None:
    """Reserve memory for batches, and for images that are being decoded.

    Args:
      memory_mib: MiB that images and their decoding may take together. Images
        wait for free memory; an image that can never fit is refused.
      batch_size: size of the largest batch; 0 to reserve nothing for batches.
      side: side of the images that the model takes, in pixels.
      ahead: number of batches to read ahead; memory is reserved for them, too.
      option: name of the option that sets the memory, for errors.
      checked: converts prepared images (k, side, side, 3) to float32, or raises
        `DataError`; without `checked`, images of floats are refused.

    Raises:
      ConfigError: if the batches do not fit into the memory.
    """
    copies = COPIES_OF_A_BATCH + ahead
    left = memory_mib * _MIB - copies * batch_size * side**2 * 3 * 4
    if left <= 0:
      raise ConfigError(
        f"{copies} batches of {batch_size} images of {side} pixels a side do "
        f"not fit into {memory_mib} MiB: expected smaller batches, or a larger "
        f"{option}."
      )
    self._batch_size, self._side, self._ahead = batch_size, side, ahead
    self._checked = checked
    self._memory = MemoryLimit(left, option, spare=min(left // 8, _SPARE))
    self._threads = ThreadPoolExecutor(THREADS, "memory_vit-images")
    # Large images have threads of their own, so that small images do not wait
    # for large images.
    self._for_large = ThreadPoolExecutor(
      max(1, THREADS - 1), "memory_vit-large"
    )

  def each(
    self,
    images: Images,
    preprocessing: EvalPreprocessing,
    first: int = 0,
    *,
    large: bool | None = None,
  ) -> list[Prepared]:
    """Prepare images; a bad image is replaced by its error.

    Args:
      images: one image or several: paths, bytes of files, uint8 pixels of any
        size, or images that are already prepared.
      preprocessing: how to prepare images; "side" is its field `image_size`.
      first: number of the first image, for errors.
      large: whether to use the threads for large images; by default, the size
        of each image decides.

    Returns:
      Per image: float32 (side, side, 3), or a `DataError` that names the image.

    Raises:
      DataError: if `images` is a dictionary, or an array without an axis.
    """
    begun = [
      (image, self._begin(image, preprocessing, large))
      for image in image_list(images)
    ]
    numbered = are_several(images)
    results: list[Prepared] = []
    try:
      for number, (image, future) in enumerate(begun, first):
        result = future.result()
        if isinstance(result, DataError):
          place = f" {number}," if numbered else ""
          result = DataError(f"image{place} {image_name(image)}: {result}")
        results.append(result)
    finally:  # on an interrupt, cancel the remaining images
      _cancel(future for _, future in begun)
    return results

  def batches(
    self, images: Images, preprocessing: EvalPreprocessing
  ) -> Iterator[np.ndarray]:
    """Yield batches of prepared images, each prepared when it is needed.

    Yields:
      float32 (b, side, side, 3).

    Raises:
      DataError: if an image cannot be prepared; the error names the image.
    """
    several = image_list(images)
    for start in range(0, len(several), self._batch_size):
      part = several[start : start + self._batch_size]
      yield stacked(self.each(part, preprocessing, start), self._side)

  def read_files(
    self, entries: Iterable[ImageFile], preprocessing: EvalPreprocessing
  ) -> Iterator[list[LoadedImage]]:
    """Yield the images of files in order, in batches; the last may be smaller.

    Args:
      entries: files to read; they are consumed no earlier than needed.
      preprocessing: how images are prepared.
    """
    left = iter(entries)
    parts = iter(lambda: list(itertools.islice(left, self._batch_size)), [])
    batches = (
      (part, [DataError(e.reason) if e.reason else e.path for e in part])
      for part in parts
    )
    for part, images in self.read_ahead(batches, preprocessing):
      yield [
        LoadedImage(ImageFile(entry.path, str(image)), None)
        if isinstance(image, DataError)
        else LoadedImage(entry, image)
        for entry, image in zip(part, images, strict=True)
      ]

  def read_ahead(
    self,
    batches: Iterable[tuple[K, Sequence[ImageLike | DataError]]],
    preprocessing: EvalPreprocessing,
  ) -> Iterator[tuple[K, list[Prepared]]]:
    """Yield batches in order; the next `ahead` batches are read meanwhile.

    Args:
      batches: (key, images) of each batch. A key may be any object, and an
        image that is missing may be replaced by a `DataError`.
      preprocessing: how images are prepared.

    Yields:
      (key, prepared images) of each batch. Errors do not name the image.
    """
    waiting: collections.deque[tuple[K, list[Future[Prepared]]]]
    waiting = collections.deque()
    try:
      for key, images in batches:
        begun = [self._begin(image, preprocessing) for image in images]
        waiting.append((key, begun))
        if len(waiting) > self._ahead:
          yield _first_finished(waiting)
      while waiting:
        yield _first_finished(waiting)
    finally:  # if the caller stops early, cancel the remaining images
      for _, begun in waiting:
        _cancel(begun)

  def _begin(
    self,
    image: ImageLike | DataError,
    preprocessing: EvalPreprocessing,
    large: bool | None = None,
  ) -> Future[Prepared]:
    large = _is_large(image) if large is None else large
    threads = self._for_large if large else self._threads
    return threads.submit(self._read, image, preprocessing)

  def _read(self, image: Any, preprocessing: EvalPreprocessing) -> Prepared:
    try:
      if isinstance(image, DataError):
        return image
      if self._checked and _is_float(image):
        return self._checked(np.asarray(image)[None], self._side)[0]
      return prepare_image(image, preprocessing, self._memory)
    except DataError as error:
      return _without_frames(error)


def _first_finished(
  waiting: collections.deque[tuple[K, list[Future[Prepared]]]],
) -> tuple[K, list[Prepared]]:
  """Wait for the images of the first batch in `waiting`, and remove the batch.

  Return (key of the batch, prepared images of the batch).
  """
  key, begun = waiting[0]
  finished = [future.result() for future in begun]
  waiting.popleft()
  return key, finished


def _cancel(begun: Iterable[Future[Prepared]]) -> None:
  for future in begun:
    future.cancel()


def _without_frames(error: DataError) -> DataError:
  """Copy an error without its traceback: a traceback keeps images in memory."""
  alone = DataError(str(error))
  cause = error.__cause__
  if isinstance(cause, OSError):  # `errno` tells callers whether to retry
    alone.__cause__ = OSError(cause.errno, cause.strerror)
  return alone


def _is_large(image: Any) -> bool:
  """Return whether the threads for large images must decode an image."""
  if not isinstance(image, bytes):
    return False
  return decoding.pixels_claimed(image) >= decoding.LARGE_PIXELS


def _is_float(image: Any) -> bool:
  return isinstance(image, np.ndarray | jax.Array) and np.issubdtype(
    image.dtype, np.floating
  )


def stacked(images: Sequence[Prepared], side: int) -> np.ndarray:
  """Stack prepared images to (n, side, side, 3); raise the first error."""
  pixels = []
  for image in images:
    if isinstance(image, DataError):
      raise image
    pixels.append(image)
  return np.stack(pixels) if pixels else np.zeros((0, side, side, 3), "f4")


def are_several(images: Images) -> TypeGuard[Iterable[ImageLike]]:
  """Return whether `images` is a collection rather than a single image."""
  if isinstance(images, np.ndarray | jax.Array):
    return images.ndim == 4 or images.dtype.kind in "OU"
  is_file = isinstance(images, str | os.PathLike | bytes)
  return not is_file and isinstance(images, Iterable)


def image_list(images: Images) -> list[Any]:
  """Return a list of images, from one image or any collection of images."""
  if isinstance(images, Mapping):
    raise DataError(
      "images are a dictionary, expected an image or a list of images."
    )
  if isinstance(images, np.ndarray | jax.Array):
    _require_list(images)
  if not are_several(images):
    return [images]
  # Convert a JAX array to NumPy as a whole: otherwise its items would be JAX
  # arrays, which would be copied from the device one by one.
  return list(np.asarray(images) if isinstance(images, jax.Array) else images)


def _require_list(images: np.ndarray | jax.Array) -> None:
  """Raise `DataError` for dtype "S", and for 0-d arrays of dtype "O" or "U"."""
  if images.dtype.kind == "S":
    raise DataError(
      f"images are an array of bytes of fixed length ({images.dtype}, kind "
      "'S'), which drops zero bytes at the ends of files: expected "
      "np.array(images, dtype=object), or a list."
    )
  if images.dtype.kind in "OU" and images.ndim == 0:
    raise DataError(
      f"images are an array of {images.dtype} without an axis, expected an "
      "image or a list of images."
    )

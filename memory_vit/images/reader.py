"""Read images in threads that share a memory limit.

All images of users are read here, except those of data sets.
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
# An image, float32 (side, side, 3) in [-1, 1], or why it is missing.
Prepared = np.ndarray | DataError
# While a batch is made: the images one by one, side by side, filled up to the
# size of a batch, and on the device, each as float32. Of one that is read
# ahead, the images one by one.
COPIES_OF_A_BATCH = 4
_MIB = 2**20
# For images that are not large, which never wait for the memory of others.
_SPARE = 128 * _MIB
K = TypeVar("K")


@dataclasses.dataclass(frozen=True, eq=False)  # it holds an array
class LoadedImage:
  """An image, float32 (side, side, 3) in [-1, 1]; None if it was skipped."""

  entry: ImageFile
  pixels: np.ndarray | None


class ImageReader:
  """Decodes and prepares images in threads that all callers share."""

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
      memory_mib: that images and their decoding may take together; images wait
        for others, and one that needs more alone is refused.
      batch_size: of the largest batch; 0 if the caller's memory holds them.
      side: of the images that the model takes, in pixels.
      ahead: batches that are read while one is used; they count as well.
      option: that sets the memory, for messages.
      checked: makes float32 of images (k, side, side, 3) that are prepared
        already, or raises `DataError`; without it, floats are refused.

    Raises:
      ConfigError: if a batch does not fit.
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
    # One thread is left for other images, which never wait for large ones.
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
    """Prepare images; in place of a bad one there is its error.

    Args:
      images: one or several. Paths, bytes of files, uint8 pixels of any size,
        or images that are prepared already.
      preprocessing: how images are prepared; side is its `image_size`.
      first: number of the first image, for messages.
      large: whether they use the threads for large images; by default, each by
        its own size.

    Returns:
      For each image float32 (side, side, 3), or a `DataError` that names it.

    Raises:
      DataError: for what is no collection of images.
    """
    begun = [
      (image, self._begin(image, preprocessing, large))
      for image in image_list(images)
    ]
    numbered = are_several(images)
    found: list[Prepared] = []
    try:
      for number, (image, future) in enumerate(begun, first):
        one = future.result()
        if isinstance(one, DataError):
          place = f" {number}," if numbered else ""
          one = DataError(f"image{place} {image_name(image)}: {one}")
        found.append(one)
    finally:  # of an interrupt; others are done
      _cancel(future for _, future in begun)
    return found

  def batches(
    self, images: Images, preprocessing: EvalPreprocessing
  ) -> Iterator[np.ndarray]:
    """Prepare images, a batch at a time, when the batch is asked for.

    Yields:
      float32 (b, side, side, 3).

    Raises:
      DataError: for the first image that cannot be prepared; it names it.
    """
    several = image_list(images)
    for start in range(0, len(several), self._batch_size):
      part = several[start : start + self._batch_size]
      yield stacked(self.each(part, preprocessing, start), self._side)

  def read_files(
    self, entries: Iterable[ImageFile], preprocessing: EvalPreprocessing
  ) -> Iterator[list[LoadedImage]]:
    """Read files, a batch at a time (fewer at the end), in order.

    Args:
      entries: files, asked for no earlier than needed.
      preprocessing: how images are prepared.
    """
    left = iter(entries)
    parts = iter(lambda: list(itertools.islice(left, self._batch_size)), [])
    batches = (
      (part, [DataError(e.reason) if e.reason else e.path for e in part])
      for part in parts
    )
    for part, found in self.read_ahead(batches, preprocessing):
      yield [
        LoadedImage(ImageFile(entry.path, str(one)), None)
        if isinstance(one, DataError)
        else LoadedImage(entry, one)
        for entry, one in zip(part, found, strict=True)
      ]

  def read_ahead(
    self,
    batches: Iterable[tuple[K, Sequence[ImageLike | DataError]]],
    preprocessing: EvalPreprocessing,
  ) -> Iterator[tuple[K, list[Prepared]]]:
    """Read batches in order; `ahead` of them are read while one is used.

    Args:
      batches: a key of the caller for each batch, and its images; an error
        stands for a missing image.
      preprocessing: how images are prepared.

    Yields:
      The keys with prepared images. Errors do not name the image.
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
    finally:  # nobody waits for what is not begun
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
  """The first batch; it is waiting until all of it is read."""
  key, begun = waiting[0]
  finished = [one.result() for one in begun]
  waiting.popleft()
  return key, finished


def _cancel(begun: Iterable[Future[Prepared]]) -> None:
  for one in begun:
    one.cancel()


def _without_frames(error: DataError) -> DataError:
  """Drop the traceback, whose frames hold the image."""
  alone = DataError(str(error))
  cause = error.__cause__
  if isinstance(cause, OSError):  # its number says whether it may pass
    alone.__cause__ = OSError(cause.errno, cause.strerror)
  return alone


def _is_large(image: Any) -> bool:
  """Whether an image file is too large for the common threads."""
  if not isinstance(image, bytes):
    return False
  return decoding.pixels_claimed(image) >= decoding.LARGE_PIXELS


def _is_float(image: Any) -> bool:
  return isinstance(image, np.ndarray | jax.Array) and np.issubdtype(
    image.dtype, np.floating
  )


def stacked(found: Sequence[Prepared], side: int) -> np.ndarray:
  """Prepared images as one array; the first error among them is raised."""
  pixels = []
  for image in found:
    if isinstance(image, DataError):
      raise image
    pixels.append(image)
  return np.stack(pixels) if pixels else np.zeros((0, side, side, 3), "f4")


def are_several(images: Images) -> TypeGuard[Iterable[ImageLike]]:
  """Whether these are a collection of images, even of one or none."""
  if isinstance(images, np.ndarray | jax.Array):
    return images.ndim == 4 or images.dtype.kind in "OU"
  one = isinstance(images, str | os.PathLike | bytes)
  return not one and isinstance(images, Iterable)


def image_list(images: Images) -> list[Any]:
  """One image, or any collection of them -> a list."""
  if isinstance(images, Mapping):
    raise DataError(
      "images are a dictionary, expected an image or a list of them."
    )
  if isinstance(images, np.ndarray | jax.Array):
    _require_list(images)
  if not are_several(images):
    return [images]
  # Of an array of JAX each item would be one again.
  return list(np.asarray(images) if isinstance(images, jax.Array) else images)


def _require_list(images: np.ndarray | jax.Array) -> None:
  """Raise `DataError` for arrays that are no list of bytes, or of paths."""
  if images.dtype.kind == "S":
    raise DataError(
      f"images are an array of bytes of one length ({images.dtype}, kind 'S'), "
      "which loses zeros at their ends: expected np.array(images, "
      "dtype=object), or a list."
    )
  if images.dtype.kind in "OU" and images.ndim == 0:
    raise DataError(
      f"images are an array of {images.dtype} with no axis, expected an image "
      "or a list of them."
    )

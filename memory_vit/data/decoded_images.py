"""Decode the images of a training split once, and keep them in memory.

Random crops differ in every epoch, so that the backbone has to see each of
them; but the file need not be decoded each time. Decoded images are no larger
than crops need: the shorter side is `data.resize` at most.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import psutil

from memory_vit.data import image_ops, parallel, raw_images
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.split import Fetch, Split
from memory_vit.errors import ConfigError
from memory_vit.images.view import LONGEST_ASPECT
from memory_vit.runtime.progress_bar import ProgressBar

logger = logging.getLogger(__name__)

# Images that are decoded before memory is looked at again.
_AT_ONCE = 16
# Share of the memory that stays free.
_SPARED = 0.1


def cache_decoded(
  split: Split, side: int, check: Callable[[], None] = lambda: None
) -> Split:
  """Decode the examples into memory as uint8, the shorter side up to `side`."""
  logger.info(
    "decoding %d images with a shorter side of at most %d px into memory",
    split.size, side,
  )  # fmt: skip
  images, taken = [], 0
  labels = np.zeros(split.size, split.label_dtype)
  with ProgressBar("decoding training images", split.size) as bar:
    for index, example in enumerate(_decoded(split, side)):
      bar.update()
      if index and index % _AT_ONCE == 0:
        check()
        _require_memory(taken, index, split)
      if isinstance(example, tf.errors.OpError):
        split.mark_unreadable({index: parallel.reason_of(example)})
        # It cannot be decoded, so that the next one takes its place.
        images.append(b"")
        continue
      image, labels[index] = example
      images.append(raw_images.encode(image))
      taken += len(images[-1])
  logger.info("%d decoded images take %.2f GiB", len(images), taken / 2**30)
  return dataclasses.replace(split, fetch=_fetch(images, labels))


def _fetch(images: Sequence[bytes], labels: np.ndarray) -> Fetch:
  """`Split.fetch` of images in a list: a tensor would copy all of them."""
  numbers = tf.constant(labels)

  def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    image = tf.numpy_function(images.__getitem__, [index], tf.string)
    return tf.ensure_shape(image, ()), tf.gather(numbers, index)

  return fetch


def _decoded(
  split: Split, side: int
) -> Iterator[tuple[np.ndarray, np.ndarray] | tf.errors.OpError]:
  def make(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    encoded, label = split.fetch(index)
    return _no_larger(image_ops.decode(encoded), side), label

  return split.each(make)


def _no_larger(image: tf.Tensor, side: int) -> tf.Tensor:
  """uint8 (height, width, 3), its shorter side at most `side`."""
  sides = tf.shape(image)[:2]
  shorter, longer = tf.reduce_min(sides), tf.reduce_max(sides)
  too_long = tf.cast(longer, tf.float32) > LONGEST_ASPECT * tf.cast(
    shorter, tf.float32
  )

  def resized() -> tf.Tensor:
    small = image_ops.resize_shorter(image, side)
    return tf.cast(tf.clip_by_value(tf.round(small), 0, 255), tf.uint8)

  return tf.cond((shorter > side) & ~too_long, resized, lambda: image)


def _require_memory(taken: int, done: int, split: Split) -> None:
  """Refuse a split that memory will not hold, by its first `done` images."""
  memory = psutil.virtual_memory()
  left = taken * (split.size - done) // done
  if left < memory.available - _SPARED * memory.total:
    return
  raise ConfigError(
    f"config.cache.what is 'images': the {split.size:,} decoded images of "
    f"{split} take about {(taken + left) / 2**30:.1f} GiB, by the "
    f"first {done}, and {memory.available / 2**30:.1f} GiB of memory are free. "
    "Expected a smaller config.data.resize, fewer images, or config.cache.what "
    "'none'."
  )

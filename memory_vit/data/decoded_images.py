"""Decode the images of a training split once, and keep them in memory.

Random crops differ in every epoch, so that the backbone has to see each of
them; but the file need not be decoded each time. Decoded images are no larger
than crops need: the shorter side is `data.resize` at most.
"""

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import psutil

from memory_vit.data import raw_images
from memory_vit.data.preparations import DecodedImage
from memory_vit.data.source import ExampleError
from memory_vit.data.split import Split
from memory_vit.errors import ConfigError
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
    examples = split.source.examples(DecodedImage(side), range(split.size))
    for index, example in enumerate(split.in_time(examples)):
      bar.update()
      if index and index % _AT_ONCE == 0:
        check()
        _require_memory(taken, index, split)
      if isinstance(example, ExampleError):
        split.mark_unreadable({index: str(example)})
        # It cannot be decoded, so that the next one takes its place.
        images.append(b"")
        continue
      image, labels[index] = example
      images.append(raw_images.encode(image))
      taken += len(images[-1])
  logger.info("%d decoded images take %.2f GiB", len(images), taken / 2**30)
  return dataclasses.replace(split, source=split.source.decoded(images, labels))


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

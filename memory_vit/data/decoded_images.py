"""Decode the images of a training split once, and keep them in memory.

Random crops differ in every epoch, so the outputs of the backbone cannot be
cached, but the decoded images can. They are no larger than crops need: their
shorter side is at most `data.resize`.
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

# Number of images between two checks of the free memory.
_AT_ONCE = 16
# Share of the total memory that must stay free.
_SPARED = 0.1


def cache_decoded(
  split: Split, side: int, check: Callable[[], None] = lambda: None
) -> Split:
  """Decode a split into memory, as uint8; shorter sides are at most `side`."""
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
        # Append a placeholder, which is never decoded: training replaces an
        # unreadable example by the next readable example.
        images.append(b"")
        continue
      image, labels[index] = example
      images.append(raw_images.encode(image))
      taken += len(images[-1])
  logger.info("%d decoded images take %.2f GiB", len(images), taken / 2**30)
  return dataclasses.replace(split, source=split.source.decoded(images, labels))


def _require_memory(taken: int, done: int, split: Split) -> None:
  """Raise if the decoded images of a split will not fit into memory.

  The estimate is based on the first `done` images, which take `taken` bytes.
  """
  memory = psutil.virtual_memory()
  left = taken * (split.size - done) // done
  if left < memory.available - _SPARED * memory.total:
    return
  raise ConfigError(
    f"config.cache.what is 'images': the {split.size:,} decoded images of "
    f"{split} take about {(taken + left) / 2**30:.1f} GiB (estimated from the "
    f"first {done}), but {memory.available / 2**30:.1f} GiB of memory is free. "
    "Expected a smaller config.data.resize, fewer images, or config.cache.what "
    "'none'."
  )

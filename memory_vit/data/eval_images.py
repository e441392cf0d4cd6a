"""Read some images of a split, as an evaluation sees them."""

from collections.abc import Sequence

import numpy as np

from memory_vit.data import image_ops, sources
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.reader import Reader, reader_of
from memory_vit.data.sources import Source
from memory_vit.errors import BrokenDataError
from memory_vit.model.task import EvalPreprocessing


def eval_images(
  source: Source | Reader,
  preprocessing: EvalPreprocessing,
  indices: Sequence[int],
) -> np.ndarray:
  """Read images by their numbers; the same bits as in `eval_batches`.

  Args:
    source: the split.
    preprocessing: how images are prepared; side is its `image_size`.
    indices: k numbers of examples, in any order.

  Returns:
    float32 (k, side, side, 3) in [-1, 1].

  Raises:
    BrokenDataError: for an image that cannot be read.
  """
  reader = reader_of(source)
  reader.source.require_images()
  side = preprocessing.image_size
  images = np.zeros((len(indices), side, side, 3), np.float32)
  if not len(indices):
    return images

  def make(index: tf.Tensor) -> tf.Tensor:
    encoded, _ = reader.source.fetch(index)
    return image_ops.eval_image(encoded, preprocessing)

  numbers = tf.data.Dataset.from_tensor_slices(tf.constant(indices, tf.int64))
  with reader.time_limit(int(indices[0])):
    found = sources.attempts(numbers, make)
    for place, (index, image) in enumerate(zip(indices, found, strict=True)):
      if isinstance(image, tf.errors.OpError):
        raise BrokenDataError(
          f"{reader.source.describe(int(index))} cannot be read: "
          f"{sources.reason_of(image)}."
        )
      images[place] = image
  return images

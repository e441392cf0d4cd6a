"""Make the random decisions of training: shuffling, crops and mirroring.

Decisions depend only on the seed and on the number of an example, or of its
epoch. So they are equal on all machines, in all processes and in resumed runs.
TensorFlow and NumPy crop images by the same random numbers. These come from the
bit generator Philox, whose stream is the same in all versions of NumPy, while
results of `Generator.permutation` may change with a version.
"""

import functools
from typing import Any

import numpy as np

# Philox key for crops and mirroring. Shuffling an epoch uses another key: the
# number of the epoch, which is always smaller than `_CROPS`.
_CROPS = 2**64 - 1
# Number of words in a block of Philox. The counter of Philox counts blocks.
_IN_A_BLOCK = 4
# Number of windows that are tried before the whole image is used. The first
# window fits nearly always, except in tiny and in very long images.
_ATTEMPTS = 8
# Number of uniform random numbers per example. The constants below are the
# indices of the numbers for mirroring, position, aspect ratio and height.
UNIFORMS = 4 + 2 * _ATTEMPTS
_FLIP, _Y, _X = 0, 1, 2
_ASPECTS = slice(4, 4 + _ATTEMPTS)
_HEIGHTS = slice(4 + _ATTEMPTS, UNIFORMS)

_LEAST_ASPECT, _MOST_ASPECT, _LEAST_AREA = 3 / 4, 4 / 3, 0.05


def shuffled(numbers: np.ndarray, size: int, seed: int) -> np.ndarray:
  """Map example numbers to records, int64 (b,); each epoch is reshuffled."""
  epochs, places = np.divmod(np.asarray(numbers, np.int64), size)
  records = np.empty_like(places)
  for epoch in np.unique(epochs):
    chosen = epochs == epoch
    records[chosen] = _order(size, seed, int(epoch))[places[chosen]]
  return records


@functools.lru_cache(maxsize=2)  # a batch may hold parts of two epochs
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
  """Return the indices of all records, shuffled for an epoch: int (size,)."""
  words = _philox(seed, epoch).random_raw(size)
  return np.argsort(words, kind="stable").astype(np.min_scalar_type(size))


def uniforms(seed: int, numbers: np.ndarray) -> np.ndarray:
  """Return numbers in [0, 1) for crops of examples: float64 (b, `UNIFORMS`).

  Consecutive examples use consecutive words of one random stream, so one call
  generates the words of many examples.
  """
  numbers = np.asarray(numbers, np.int64)
  if not len(numbers):
    return np.zeros((0, UNIFORMS))
  gaps = np.flatnonzero(np.diff(numbers) != 1) + 1
  words = [
    _philox(seed, _CROPS, int(run[0])).random_raw(len(run) * UNIFORMS)
    for run in np.split(numbers, gaps)
  ]
  # Keep 53 bits, because a float64 holds 53 bits without rounding.
  return (np.concatenate(words) >> 11).reshape(-1, UNIFORMS) * 2.0**-53


def undecided(numbers: np.ndarray) -> np.ndarray:
  """Return a placeholder for `uniforms` if nothing is random: float64 (b, 1).

  Rows have one element, because TensorFlow crashes on rows without elements.
  """
  return np.zeros((len(numbers), 1))


def _philox(seed: int, key: int, number: int = 0) -> np.random.Philox:
  counter = number * (UNIFORMS // _IN_A_BLOCK)
  return np.random.Philox(key=np.array([seed, key], np.uint64), counter=counter)


def inception_window(
  ops: Any, uniforms: Any, height: Any, width: Any
) -> tuple[Any, Any, Any, Any]:
  """Choose a part of an image: 5-100 % of its area, aspect 3/4 to 4/3.

  The distribution is that of `tf.image.sample_distorted_bounding_box` (uniform
  aspect ratio, then a height among the possible integers, then the place), but
  the last row and column are as frequent as the rest. Operations are exact or
  rounded as in IEEE 754, so NumPy and TensorFlow choose equal windows.

  Args:
    ops: numpy or tensorflow, whose functions have the same names.
    uniforms: random numbers of the example, float64 (`UNIFORMS`,).
    height: height of the image, float64 ().
    width: width of the image, float64 ().

  Returns:
    y, x, height and width, float64 (); the whole image if no window fits.
  """
  aspects = _LEAST_ASPECT + (_MOST_ASPECT - _LEAST_ASPECT) * uniforms[_ASPECTS]
  area = _LEAST_AREA * (height * width)
  least = ops.round(ops.sqrt(area / aspects))
  most = ops.minimum(height, ops.floor((width + 0.5) / aspects))
  count = ops.maximum(most - least, 0.0) + 1.0
  heights = least + ops.floor(uniforms[_HEIGHTS] * count)
  # If rounding has made the area of a window too small, add a row.
  too_small = heights * ops.round(heights * aspects) < area
  heights = ops.where(too_small, heights + 1.0, heights)
  widths = ops.round(heights * aspects)
  fits = (heights * widths >= area) & (heights <= height) & (widths <= width)
  first = ops.argmax(fits)
  is_valid = fits[first] & (heights[first] * widths[first] > 0.0)
  height_of = ops.where(is_valid, heights[first], height)
  width_of = ops.where(is_valid, widths[first], width)
  y, x = random_place(
    ops, uniforms, height + 1.0 - height_of, width + 1.0 - width_of
  )
  return y, x, height_of, width_of


def random_place(
  ops: Any, uniforms: Any, rows: Any, columns: Any
) -> tuple[Any, Any]:
  """Choose y below `rows` and x below `columns`, float64 ()."""
  return ops.floor(uniforms[_Y] * rows), ops.floor(uniforms[_X] * columns)


def is_mirrored(uniforms: Any) -> Any:
  """Return whether an example is mirrored; the probability is 1/2."""
  return uniforms[_FLIP] < 0.5

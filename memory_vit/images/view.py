"""Resize, crop and scale decoded images for a model, in NumPy or by Pillow.

Bilinear interpolation without antialiasing is bitwise identical to TensorFlow:
it is computed in float32, in the order of operations of `tf.image.resize`.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8
from PIL import Image

from memory_vit.errors import DataError
from memory_vit.model.task import EvalPreprocessing

# Maximum ratio of the longer to the shorter side of an image: resizing an image
# of a larger ratio could fill the memory.
LONGEST_ASPECT = 32.0
# Maximum number of pixels of a resized image before the crop (403 MB in
# float32). If the shorter side is resized to at most 1,024 pixels, images that
# `LONGEST_ASPECT` allows never exceed this maximum.
MAX_RESIZED_PIXELS = 2**25

_FILTERS = {
  "bilinear_antialias": Image.Resampling.BILINEAR,
  "bicubic": Image.Resampling.BICUBIC,
}


class _Neighbours(NamedTuple):
  """For each new pixel along an axis, the two old pixels around it.

  `lower` and `upper` are indices of old pixels; `weight` is the weight of the
  upper pixel.
  """

  lower: Int[np.ndarray, " new"]
  upper: Int[np.ndarray, " new"]
  weight: Float32[np.ndarray, " new"]


def eval_view(
  pixels: UInt8[np.ndarray, "height width 3"], preprocessing: EvalPreprocessing
) -> Float32[np.ndarray, "side side 3"]:
  """Prepare decoded pixels for evaluation.

  Args:
    pixels: the image, with at least one pixel.
    preprocessing: how to prepare the image; "side" is its field `image_size`.

  Returns:
    Values in [-1, 1].

  Raises:
    DataError: if the image is too long for a central crop.
  """
  side = preprocessing.image_size
  old_height, old_width = pixels.shape[:2]
  height, width = resized_shape(old_height, old_width, preprocessing)
  y, x = preprocessing.begin(height), preprocessing.begin(width)
  if preprocessing.interpolation == "bilinear":
    square = slice(y, y + side), slice(x, x + side)
    view = bilinear(pixels, (height, width), *square)
  else:
    resample = _FILTERS[preprocessing.interpolation]
    # Resize the width first, as Pillow before 13 does. A single call of Pillow
    # 13 may resize the height first, which rounds differently.
    resized = Image.fromarray(pixels).resize((width, old_height), resample)
    resized = resized.resize((width, height), resample)
    cut = resized.crop((x, y, x + side, y + side))
    view = np.asarray(cut).astype(np.float32)
  return scaled(view)


def scaled(
  levels: Float32[np.ndarray, "rows columns 3"],
) -> Float32[np.ndarray, "rows columns 3"]:
  """Scale levels from [0, 255] to [-1, 1], in place."""
  levels -= np.float32(127.5)
  levels /= np.float32(127.5)
  return levels


def to_levels(
  views: Float[np.ndarray, "*b side side 3"],
) -> UInt8[np.ndarray, "*b side side 3"]:
  """Convert prepared images to pixels; values outside [-1, 1] are clipped."""
  return np.clip(np.round((views + 1) * 127.5), 0, 255).astype(np.uint8)


def resized_shape(
  height: int, width: int, preprocessing: EvalPreprocessing
) -> tuple[int, int]:
  """Return (height, width) after resizing; raise if the image is too long."""
  if not preprocessing.resize:
    return preprocessing.image_size, preprocessing.image_size
  return shape_by_shorter_side(
    height, width, preprocessing.resize, preprocessing.interpolation
  )


def shape_by_shorter_side(
  height: int, width: int, side: int, interpolation: str = "bilinear"
) -> tuple[int, int]:
  """Return (height, width) after resizing the shorter side to `side` pixels."""
  shorter = min(height, width)
  if max(height, width) > shorter * LONGEST_ASPECT:
    raise DataError(
      f"one side is more than {LONGEST_ASPECT:.0f} times the other"
    )
  if interpolation == "bilinear":  # round like TensorFlow
    old = np.array([height, width], np.float32)
    new = np.round(old * (np.float32(side) / np.float32(shorter)))
  else:  # round down, like timm and transformers
    new = np.array([side * height // shorter, side * width // shorter])
  if new.prod() > MAX_RESIZED_PIXELS:
    raise DataError(
      f"too long: with a shorter side of {side} pixels, the image would have "
      f"more than {MAX_RESIZED_PIXELS:,} pixels"
    )
  return int(new[0]), int(new[1])


def view_bytes(
  height: int, width: int, preprocessing: EvalPreprocessing
) -> int:
  """Return a bound of the peak memory of `eval_view`, without `pixels`."""
  new_height, new_width = resized_shape(height, width, preprocessing)
  side = preprocessing.image_size
  if preprocessing.interpolation == "bilinear":
    # Resizing the width holds two float32 rows and a uint8 row in memory for
    # each row of the image. Resizing the height then holds one float32 row for
    # each row of the image, and two for each row of the result.
    along = 3 * 4 * side
    rows = min(2 * side, max(height, width))  # EXIF may swap rows and columns
    return max(rows * (2 * along + 3 * side), (rows + 2 * side) * along)
  view = 4 * 3 * 4 * side**2
  # Pillow holds three images of 4 bytes per pixel: a copy of the original,
  # an image with the new width and the old height, and the resized image. EXIF
  # may swap height and width.
  between = max(height * new_width, width * new_height)
  return view + 4 * (height * width + between + new_height * new_width)


def _neighbors(old: int, new: int, part: slice) -> _Neighbours:
  """Return the old pixels around each new pixel, along one axis.

  `old` and `new` are the lengths of the axis before and after resizing. The
  slice `part` chooses the new pixels.
  """
  scale = np.float32(old) / np.float32(new)
  half = np.float32(0.5)
  place = (np.arange(new, dtype=np.float32)[part] + half) * scale - half
  floor = np.floor(place)
  return _Neighbours(
    lower=np.maximum(floor.astype(np.int64), 0),
    upper=np.minimum(np.ceil(place).astype(np.int64), old - 1),
    weight=place - floor,
  )


def bilinear(
  pixels: UInt8[np.ndarray, "height width 3"],
  shape: tuple[int, int],
  y: slice,
  x: slice,
) -> Float32[np.ndarray, "rows columns 3"]:
  """Resize pixels to `shape`, but compute only rows `y` and columns `x`."""
  rows = _neighbors(pixels.shape[0], shape[0], y)
  columns = _neighbors(pixels.shape[1], shape[1], x)
  # The result needs only some rows of `pixels`: interpolate along each of them,
  # then between them.
  needed, place = np.unique((rows.lower, rows.upper), return_inverse=True)
  lower, upper = place.reshape(2, -1)
  if not pixels.flags.c_contiguous:  # a rotated view: copy the needed rows
    pixels = np.ascontiguousarray(pixels[needed])
    needed = np.arange(len(needed))
  # Index the pixels as if the image were one long row, so that `take` copies
  # only the needed pixels, not whole rows.
  begins = needed[:, None] * pixels.shape[1]
  one_row = pixels.reshape(-1, 3)
  # Flatten columns and channels to one axis, because NumPy is slow along a last
  # axis of length 3.
  along = _between(
    _rows_of_values(one_row.take(begins + columns.lower, axis=0)),
    _rows_of_values(one_row.take(begins + columns.upper, axis=0)),
    np.repeat(columns.weight, 3)[None],
  )
  values = _between(along[lower], along[upper], rows.weight[:, None])
  return values.reshape(len(lower), -1, 3)


def _rows_of_values(
  pixels: UInt8[np.ndarray, "rows columns 3"],
) -> Float32[np.ndarray, "rows values"]:
  return pixels.reshape(len(pixels), -1).astype(np.float32)


def _between(
  first: Float32[np.ndarray, "rows values"],
  second: Float32[np.ndarray, "rows values"],
  weight: Float32[np.ndarray, "_ _"],
) -> Float32[np.ndarray, "rows values"]:
  """Compute first + (second - first) * weight in place; return `second`."""
  second -= first
  second *= weight
  second += first
  return second

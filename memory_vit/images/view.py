"""Resize, crop and scale decoded images for a model, in NumPy or by Pillow.

Bilinear without antialiasing is computed in float32 and in the order of
`tf.image.resize`: bitwise identical to TensorFlow.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8
from PIL import Image

from memory_vit.errors import DataError
from memory_vit.model.task import EvalPreprocessing

# Resized by its shorter side, a longer image would fill the memory.
LONGEST_ASPECT = 32.0
# Before a crop: 403 MB, as float32. Any image stays below up to a shorter
# side of 1,024, and a square up to `vit_config.MAX_RESIZE`.
MAX_RESIZED_PIXELS = 2**25

_FILTERS = {
  "bilinear_antialias": Image.Resampling.BILINEAR,
  "bicubic": Image.Resampling.BICUBIC,
}


class _Neighbours(NamedTuple):
  """The two old pixels of each new one, and the weight of the upper one."""

  lower: Int[np.ndarray, " new"]
  upper: Int[np.ndarray, " new"]
  weight: Float32[np.ndarray, " new"]


def eval_view(
  pixels: UInt8[np.ndarray, "height width 3"], preprocessing: EvalPreprocessing
) -> Float32[np.ndarray, "side side 3"]:
  """Prepare decoded pixels for evaluation.

  Args:
    pixels: of an image, at least one.
    preprocessing: how; side is its `image_size`.

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
    # By two calls: Pillow 13 begins with the height where that is faster, and
    # rounds other pixels than the versions before.
    resized = Image.fromarray(pixels).resize((width, old_height), resample)
    resized = resized.resize((width, height), resample)
    cut = resized.crop((x, y, x + side, y + side))
    view = np.asarray(cut).astype(np.float32)
  return scaled(view)


def scaled(
  levels: Float32[np.ndarray, "rows columns 3"],
) -> Float32[np.ndarray, "rows columns 3"]:
  """Grey levels as values in [-1, 1], in place."""
  levels -= np.float32(127.5)
  levels /= np.float32(127.5)
  return levels


def to_levels(
  views: Float[np.ndarray, "*b side side 3"],
) -> UInt8[np.ndarray, "*b side side 3"]:
  """Convert prepared images, in [-1, 1], to pixels; the rest is clipped."""
  return np.clip(np.round((views + 1) * 127.5), 0, 255).astype(np.uint8)


def resized_shape(
  height: int, width: int, preprocessing: EvalPreprocessing
) -> tuple[int, int]:
  """Height and width of a resized image, before its crop; refuse long ones."""
  if not preprocessing.resize:
    return preprocessing.image_size, preprocessing.image_size
  return shape_by_shorter_side(
    height, width, preprocessing.resize, preprocessing.interpolation
  )


def shape_by_shorter_side(
  height: int, width: int, side: int, interpolation: str = "bilinear"
) -> tuple[int, int]:
  """Height and width, of which `side` is the smaller; refuse long images."""
  shorter = min(height, width)
  if max(height, width) > shorter * LONGEST_ASPECT:
    raise DataError(
      f"one side is more than {LONGEST_ASPECT:.0f} times the other"
    )
  if interpolation == "bilinear":  # as TensorFlow rounds
    old = np.array([height, width], np.float32)
    new = np.round(old * (np.float32(side) / np.float32(shorter)))
  else:  # as timm and transformers do
    new = np.array([side * height // shorter, side * width // shorter])
  if new.prod() > MAX_RESIZED_PIXELS:
    raise DataError(
      f"with a shorter side of {side} pixels it would have more than "
      f"{MAX_RESIZED_PIXELS:,}: too long"
    )
  return int(new[0]), int(new[1])


def view_bytes(
  height: int, width: int, preprocessing: EvalPreprocessing
) -> int:
  """Upper bound of the memory that `eval_view` takes beside the pixels."""
  new_height, new_width = resized_shape(height, width, preprocessing)
  side = preprocessing.image_size
  if preprocessing.interpolation == "bilinear":
    # Along each row that is needed, two neighbors in float32 and the bytes of
    # one; then the rows, and two neighbors in float32 of each pixel.
    along = 3 * 4 * side
    rows = min(2 * side, max(height, width))  # it may be turned
    return max(rows * (2 * along + 3 * side), (rows + 2 * side) * along)
  view = 4 * 3 * 4 * side**2
  # Pillow takes 4 bytes a pixel: for its copy, for the image that has the new
  # width and the old height, and for the resized one.
  old, new = height * width, new_height * new_width
  return view + 4 * (old + max(old, new) + new)


def _neighbors(old: int, new: int, part: slice) -> _Neighbours:
  """For a part of the `new` pixels that `old` ones become."""
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
  """Resize to a shape; of the grey levels, the part y, x is computed."""
  rows = _neighbors(pixels.shape[0], shape[0], y)
  columns = _neighbors(pixels.shape[1], shape[1], x)
  # Between four pixels: along each row that is needed, once.
  needed, place = np.unique((rows.lower, rows.upper), return_inverse=True)
  lower, upper = place.reshape(2, -1)
  if not pixels.flags.c_contiguous:  # turned: the rows that are needed are few
    pixels = np.ascontiguousarray(pixels[needed])
    needed = np.arange(len(needed))
  # By their numbers in the image, so that no row of it is copied as a whole.
  begins = needed[:, None] * pixels.shape[1]
  one_row = pixels.reshape(-1, 3)
  # Rows of single values, since NumPy is slow along an axis of three.
  along = _between(
    _rows_of_values(one_row.take(begins + columns.lower, axis=0)),
    _rows_of_values(one_row.take(begins + columns.upper, axis=0)),
    np.repeat(columns.weight, 3)[None],
  )
  found = _between(along[lower], along[upper], rows.weight[:, None])
  return found.reshape(len(lower), -1, 3)


def _rows_of_values(
  pixels: UInt8[np.ndarray, "rows columns 3"],
) -> Float32[np.ndarray, "rows values"]:
  return pixels.reshape(len(pixels), -1).astype(np.float32)


def _between(
  first: Float32[np.ndarray, "rows values"],
  second: Float32[np.ndarray, "rows values"],
  weight: Float32[np.ndarray, "_ _"],
) -> Float32[np.ndarray, "rows values"]:
  """First + (second - first) * weight, in place of `second`."""
  second -= first
  second *= weight
  second += first
  return second

"""Check prepared images that callers pass as arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from memory_vit.errors import DataError
from memory_vit.runtime.messages import first_line
from memory_vit.tasks import image_check


def checked_pixels(pixels: Any, side: int) -> np.ndarray:
  """Return float32 (k, side, side, 3) in [-1, 1], or raise `DataError`."""
  if not isinstance(pixels, np.ndarray | jax.Array):
    raise DataError(
      f"pixels are of type {type(pixels).__name__}, expected an array, for "
      "example from Predictor.prepare."
    )
  array = np.asarray(pixels)
  image_check.require_shape(array, side)
  image_check.begin(array)()
  return array.astype(np.float32, copy=False)


def stacked_column(pixels: Any) -> Any:
  """Stack a column (for example, a list) of prepared images into one array."""
  if isinstance(pixels, np.ndarray) and pixels.dtype != object:
    return pixels
  try:
    return np.stack(list(pixels))
  except (TypeError, ValueError) as error:
    raise DataError(
      f"the column 'pixels' cannot be stacked ({first_line(error)}): expected "
      "prepared images of one shape."
    ) from error

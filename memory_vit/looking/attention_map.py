"""Attention maps of patches, and overlays of maps on images."""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from memory_vit.errors import DataError
from memory_vit.looking.attention_rollout import AttentionRollout
from memory_vit.looking.token_attention import TokenAttention

# Every 17th colour of matplotlib's "inferno" (van der Walt and Smith, 2015;
# CC0), copied because matplotlib is only installed by the extra `train`.
INFERNO = np.array(
  [
    (0, 0, 4), (12, 8, 38), (36, 12, 79), (66, 10, 104),
    (93, 18, 110), (120, 28, 109), (147, 38, 103), (174, 48, 92),
    (199, 62, 76), (221, 81, 58), (237, 105, 37), (248, 133, 15),
    (252, 165, 10), (250, 198, 45), (242, 230, 97), (252, 255, 164),
  ],
  np.float32,
)  # fmt: skip


def patch_map(
  attention: TokenAttention | AttentionRollout,
) -> Float32[np.ndarray, "b l *h rows columns"]:
  """Return the attention to patches, in rows and columns as in the image.

  Attention to class tokens, registers, memory and tasks is left out, so a map
  sums to less than 1.

  Args:
    attention: result of `token_attention` or `attention_rollout`.

  Returns:
    A map for each image and layer (and head, if the attention is per head).
  """
  patches = attention.config.num_patches
  side = math.isqrt(patches)
  image = attention.image
  return image[..., -patches:].reshape(*image.shape[:-1], side, side)


def overlay(
  image: UInt8[np.ndarray, "height width 3"],
  heat: Float32[np.ndarray, "rows columns"],
  *,
  peak: float | None = None,
  opacity: float = 0.6,
) -> UInt8[np.ndarray, "height width 3"]:
  """Lay an attention map over an image, in colours.

  Args:
    image: the image that the model saw (the crop, if it was cropped), in any
      size. Pixels x in [-1, 1] of `preprocess` become uint8 levels by
      (x + 1) * 127.5.
    heat: one map of `patch_map`, with values of at least 0.
    peak: the value that gets the brightest colour, so that several maps can
      share a scale; by default the greatest value of this map.
    opacity: from 0, only the image, to 1, only the map.

  Raises:
    DataError: for an image that is not uint8 (height, width, 3), a map with
      negative or non-finite values, or a peak or opacity out of range.
  """
  _require_image(image)
  heat = np.asarray(heat, np.float32)
  numbers = heat.ndim == 2 and heat.size > 0 and np.isfinite(heat).all()
  if not numbers or heat.min() < 0:
    raise DataError(
      f"the attention map has shape {heat.shape}, expected (rows, columns) and "
      "only finite numbers of at least 0: give one of the maps of patch_map."
    )
  peak = float(heat.max()) if peak is None else peak
  if not (0 <= opacity <= 1 and 0 <= peak < math.inf):
    raise DataError(
      f"opacity is {opacity} and peak is {peak}, expected an opacity of 0 to 1 "
      "and a finite peak of at least 0."
    )
  height, width = image.shape[:2]
  # Do not interpolate: a smooth map would suggest detail that is not there.
  sized = Image.fromarray(heat).resize(
    (width, height), Image.Resampling.NEAREST
  )
  values = np.asarray(sized)
  values = values / np.float32(peak) if peak else values
  mixed = (1 - opacity) * image + opacity * _inferno(values)
  return np.round(mixed).astype(np.uint8)


def _require_image(image: np.ndarray) -> None:
  dtype = getattr(image, "dtype", None)
  shape: tuple[int, ...] = getattr(image, "shape", ())
  if dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or 0 in shape:
    actual = type(image).__name__ if dtype is None else f"{dtype} {shape}"
    raise DataError(
      f"the image of an overlay is {actual}, expected uint8 of shape (height, "
      "width, 3): convert pixels x in [-1, 1] by (x + 1) * 127.5."
    )


def _inferno(
  values: Float32[np.ndarray, "height width"],
) -> Float32[np.ndarray, "height width 3"]:
  """Return RGB colours of 0 to 255 for values, which are clipped to [0, 1]."""
  anchors = np.linspace(0, 1, len(INFERNO))
  return np.stack(
    [np.interp(values, anchors, INFERNO[:, i]) for i in range(3)], axis=-1
  ).astype(np.float32)

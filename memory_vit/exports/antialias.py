"""Resize with antialiasing in jax, as Pillow does it on uint8 pixels.

Pillow's sums are of fixed point, these are float32: where one lies in the
middle between two grey levels, it may be rounded to the other one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt8

from memory_vit.model.task import EvalPreprocessing


def resize_and_crop(
  images: UInt8[Array, "b height width 3"], evaluation: EvalPreprocessing
) -> Float32[Array, "b side side 3"]:
  """Resize and crop as `images.view`; height and width may be symbolic.

  How many pixels take part in a new one depends on the size of the image, so
  this multiplies by dense matrices: of a photograph of 12 megapixels that costs
  as much as a ViT-B/16.

  Args:
    images: of 0 to 255; sides of at most 16,384 pixels, of which the longer is
      at most 32 times the shorter, as `mv.preprocess` takes them.
    evaluation: with an interpolation that antialiases; side is its
      `image_size`.

  Returns:
    Whole numbers of 0 to 255.
  """
  side = evaluation.image_size
  sides = jnp.stack([jnp.asarray(n, jnp.int32) for n in images.shape[1:3]])
  if evaluation.resize:
    resized = evaluation.resize * sides // jnp.min(sides)
  else:
    resized = jnp.full(2, side, jnp.int32)
  begins = evaluation.begin(resized)
  pixels = images.astype(jnp.float32)
  # Pillow rounds after the width, and again after the height.
  for axis in (2, 1):
    weights = _weights(
      jax.lax.broadcasted_iota(jnp.int32, (pixels.shape[axis], side), 0),
      jnp.arange(side, dtype=jnp.int32) + begins[axis - 1],
      (sides[axis - 1], resized[axis - 1]),
      evaluation.interpolation,
    )
    pixels = _rounded(_weighted(pixels, weights, axis))
  return pixels


def _weights(
  old: Int32[Array, "old side"],
  new: Int32[Array, " side"],
  sizes: tuple[Int32[Array, ""], Int32[Array, ""]],
  interpolation: str,
) -> Float32[Array, "old side"]:
  """Share of each old pixel in each new one, along an axis.

  Args:
    old: numbers of the old pixels.
    new: numbers of the new ones.
    sizes: how many pixels the axis has, and how many it gets.
    interpolation: "bilinear_antialias" or "bicubic".
  """
  before, after = sizes
  # From centre to centre, in units of the wider of the two kinds of pixels.
  # In float32 places in a large image would be off by parts of a pixel.
  apart = jnp.abs((2 * old + 1) * after - (2 * new + 1)[None] * before)
  unit = 2 * jnp.maximum(before, after)
  x = apart.astype(jnp.float32) / unit.astype(jnp.float32)
  if interpolation == "bicubic":  # of Keys, a = -0.5
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = jnp.where(x < 1, inner, jnp.where(x < 2, outer, 0.0))
  else:
    weights = jnp.maximum(1 - x, 0.0)
  return weights / jnp.sum(weights, axis=0, keepdims=True)


def _weighted(
  pixels: Float32[Array, "b height width 3"],
  weights: Float32[Array, "old side"],
  axis: int,
) -> Float32[Array, "b _ _ 3"]:
  """Sum along an axis; accelerators would take factors of fewer bits."""
  spec = "bhwc,hn->bnwc" if axis == 1 else "bhwc,wn->bhnc"
  return jnp.einsum(spec, pixels, weights, precision=jax.lax.Precision.HIGHEST)


def _rounded(
  pixels: Float32[Array, "b height width 3"],
) -> Float32[Array, "b height width 3"]:
  """To grey levels, half of one upwards."""
  return jnp.clip(jnp.floor(pixels + 0.5), 0, 255)

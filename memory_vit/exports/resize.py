"""Resize, crop and scale pixels in jax, as evaluation does.

Without antialiasing, results are those of TensorFlow's `tf.image.resize`; with
it, those of Pillow on uint8 pixels. Pillow sums in fixed point, this module in
float32, so sums halfway between two grey levels may be rounded differently.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt8

from memory_vit.model.task import EvalPreprocessing


def prepare(
  images: UInt8[Array, "b height width 3"], preprocessing: EvalPreprocessing
) -> Float32[Array, "b side side 3"]:
  """Resize, crop and scale to [-1, 1]; height and width may be symbolic.

  Sides have at most 16,384 pixels, and the longer side is at most 32 times the
  shorter side, as `mv.preprocess` requires.
  """
  old = jnp.stack([jnp.asarray(n, jnp.int32) for n in images.shape[1:3]])
  new = _resized(old, preprocessing)
  square = jnp.arange(preprocessing.image_size, dtype=jnp.int32)
  begins = preprocessing.begin(new)
  pixels = images.astype(jnp.float32)
  # Like Pillow, resize the width, then the height. With antialiasing, round the
  # pixels after each axis.
  for axis in (2, 1):
    numbers = square + begins[axis - 1]
    sizes = old[axis - 1], new[axis - 1]
    if preprocessing.interpolation == "bilinear":
      pixels = _between(pixels, numbers, sizes, axis)
    else:
      every = (pixels.shape[axis], preprocessing.image_size)
      weights = _weights(
        jax.lax.broadcasted_iota(jnp.int32, every, 0),
        numbers,
        sizes,
        preprocessing.interpolation,
      )
      pixels = _rounded(_weighted(pixels, weights, axis))
  return (pixels - 127.5) / 127.5


def _resized(
  old: Int32[Array, " 2"], preprocessing: EvalPreprocessing
) -> Int32[Array, " 2"]:
  """Return (height, width) after resizing, like `images.view.resized_shape`."""
  if not preprocessing.resize:
    return jnp.full(2, preprocessing.image_size, jnp.int32)
  if preprocessing.interpolation != "bilinear":
    return preprocessing.resize * old // jnp.min(old)
  sides = old.astype(jnp.float32)
  resized = jnp.round(sides * (preprocessing.resize / jnp.min(sides)))
  return resized.astype(jnp.int32)


def _between(
  pixels: Float32[Array, "b height width 3"],
  numbers: Int32[Array, " side"],
  sizes: tuple[Int32[Array, ""], Int32[Array, ""]],
  axis: int,
) -> Float32[Array, "b _ _ 3"]:
  """Return new pixels, each interpolated between the two nearest old pixels.

  `numbers` are indices of new pixels. `sizes` are the old and the new length of
  the axis. Gathering pixels is cheaper than `jax.image.resize`, which
  multiplies by dense matrices.
  """
  before, after = sizes
  at = (numbers.astype(jnp.float32) + 0.5) * (before / after) - 0.5
  last = pixels.shape[axis] - 1
  floor = jnp.floor(at)
  index = floor.astype(jnp.int32)
  first = jnp.take(pixels, jnp.clip(index, 0, last), axis=axis)
  second = jnp.take(pixels, jnp.clip(index + 1, 0, last), axis=axis)
  shape = [1, 1, 1, 1]
  shape[axis] = -1
  return first + (second - first) * (at - floor).reshape(shape)


def _weights(
  old: Int32[Array, "old side"],
  new: Int32[Array, " side"],
  sizes: tuple[Int32[Array, ""], Int32[Array, ""]],
  interpolation: str,
) -> Float32[Array, "old side"]:
  """Return the share of each old pixel in each new pixel, along an axis.

  `sizes` are the old and the new length of the axis. The matrix of shares is
  dense: the number of old pixels that a new pixel covers depends on the size of
  the image, which is unknown when the program is compiled. For an image of 12
  megapixels, multiplying by the matrix costs as much as a ViT-B/16.
  """
  before, after = sizes
  # `x` is the distance from the centre of a new pixel to the centre of an old
  # pixel, in units of the wider of the two pixels. The distance is computed in
  # integers, because float32 would be off by parts of a pixel in large images.
  apart = jnp.abs((2 * old + 1) * after - (2 * new + 1)[None] * before)
  unit = 2 * jnp.maximum(before, after)
  x = apart.astype(jnp.float32) / unit.astype(jnp.float32)
  if interpolation == "bicubic":  # kernel of Keys (1981), a = -0.5
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
  """Return weighted sums along `axis`, in full float32 even on accelerators."""
  spec = "bhwc,hn->bnwc" if axis == 1 else "bhwc,wn->bhnc"
  return jnp.einsum(spec, pixels, weights, precision=jax.lax.Precision.HIGHEST)


def _rounded(
  pixels: Float32[Array, "b height width 3"],
) -> Float32[Array, "b height width 3"]:
  """Round pixels to whole grey levels of 0 to 255; round halves up."""
  return jnp.clip(jnp.floor(pixels + 0.5), 0, 255)

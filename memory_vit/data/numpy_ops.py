"""Decode, crop and scale images for the model in NumPy, without TensorFlow.

Results are bitwise identical to those of `image_ops`, except at the rim of
random crops of a JPEG: TensorFlow decodes only the crop, although the colours
at its rim depend on pixels outside of it.
"""

import numpy as np
from jaxtyping import Float32, UInt8

from memory_vit.config import DataConfig
from memory_vit.data import crop_sizes, oriented, random_decisions, raw_images
from memory_vit.images import decoding, exif, view
from memory_vit.images.view import LONGEST_ASPECT
from memory_vit.model.task import EvalPreprocessing


def train_image(
  encoded: bytes,
  uniforms: np.ndarray,
  *,
  data: DataConfig,
  image_size: int,
  interpolation: str = "bilinear",
) -> Float32[np.ndarray, "side side 3"]:
  """Crop an encoded image at random, as `image_ops.train_image` does."""
  pixels = decode(encoded)
  if data.train_crop == "small":
    shorter = crop_sizes.shorter_side(data.resize, image_size)
    image = small_crop(pixels, uniforms, shorter, image_size)
  else:
    if data.train_crop == "inception":
      pixels = inception_crop(pixels, uniforms)
      interpolation = "bilinear"
    squeezed = EvalPreprocessing(
      image_size=image_size, interpolation=interpolation
    )
    image = view.eval_view(pixels, squeezed)
  if data.flip and random_decisions.is_mirrored(uniforms):
    image = image[:, ::-1]
  return image


def eval_image(
  encoded: bytes, preprocessing: EvalPreprocessing
) -> Float32[np.ndarray, "side side 3"]:
  """Prepare an encoded image for evaluation."""
  return view.eval_view(decode(encoded), preprocessing)


def decode(encoded: bytes) -> UInt8[np.ndarray, "height width 3"]:
  """Decode a file, or an image of `raw_images`; turn a marked image upright."""
  orientation, file = oriented.split(encoded)
  if file.startswith(raw_images.MAGIC):
    pixels = raw_images.decode(file)
  else:
    pixels = decoding.decode(file)
  return exif.turned(pixels, orientation)


def inception_crop(
  pixels: UInt8[np.ndarray, "height width 3"], uniforms: np.ndarray
) -> UInt8[np.ndarray, "rows columns 3"]:
  """Crop a random part, see `random_decisions.inception_window`."""
  height, width = map(float, pixels.shape[:2])
  window = random_decisions.inception_window(np, uniforms, height, width)
  y, x, rows, columns = map(int, window)
  return pixels[y : y + rows, x : x + columns]


def small_crop(
  pixels: UInt8[np.ndarray, "height width 3"],
  uniforms: np.ndarray,
  shorter_side: int,
  side: int,
) -> Float32[np.ndarray, "side side 3"]:
  """Resize an image to `shorter_side`, and crop a random square from it."""
  height, width = pixels.shape[:2]
  shape = view.shape_by_shorter_side(height, width, shorter_side)
  rows, columns = (length - side + 1 for length in shape)
  y, x = map(int, random_decisions.random_place(np, uniforms, rows, columns))
  square = slice(y, y + side), slice(x, x + side)
  return view.scaled(view.bilinear(pixels, shape, *square))


def no_larger(
  pixels: UInt8[np.ndarray, "height width 3"], side: int
) -> UInt8[np.ndarray, "rows columns 3"]:
  """Shrink the shorter side to at most `side`, except in very long images."""
  height, width = pixels.shape[:2]
  shorter, longer = sorted((height, width))
  if shorter <= side or longer > LONGEST_ASPECT * shorter:
    return pixels
  shape = view.shape_by_shorter_side(height, width, side)
  resized = view.bilinear(pixels, shape, slice(None), slice(None))
  return np.clip(np.round(resized), 0, 255).astype(np.uint8)

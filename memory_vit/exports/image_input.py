"""What an exported function takes: floats in [-1, 1], or uint8 pixels.

Of pixels the resizing and scaling of evaluation become part of the function:
bilinear without antialiasing as by TensorFlow's `tf.image.resize`, and with
antialiasing as by Pillow.
"""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from memory_vit.errors import ExportError
from memory_vit.exports import antialias
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime.messages import brief

KINDS = ("float32", "uint8")
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInput:
  """The images that an exported function takes.

  Attributes:
    kind: "float32": (b, side, side, 3) in [-1, 1]; "uint8": pixels
      (b, height, width, 3) of 0 to 255.
    size: (height, width) of pixels where they are fixed; None for any.
  """

  kind: str = "float32"
  size: tuple[int, int] | None = None

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ExportError(
        f"input is {brief(self.kind)}, expected one of {', '.join(KINDS)}."
      )
    if self.size and self.kind != "uint8":
      raise ExportError(
        "input_size is that of uint8 images: floats have the image size of "
        "the backbone. Give --input=uint8 too, or leave it out."
      )


def parse_size(text: str) -> tuple[int, int]:
  """HEIGHTxWIDTH -> (height, width).

  Raises:
    ExportError: for anything else.
  """
  found = _SIZE.fullmatch(text)
  if not found:
    raise ExportError(
      f"input_size is {brief(text)}, expected HEIGHTxWIDTH in pixels, such as "
      "480x640."
    )
  return int(found[1]), int(found[2])


def prepare(
  images: UInt8[Array, "b height width 3"], evaluation: EvalPreprocessing
) -> Float32[Array, "b side side 3"]:
  """Prepare pixels as evaluation does; height and width may be symbolic.

  Args:
    images: of 0 to 255.
    evaluation: how; side is its `image_size`.

  Returns:
    Values in [-1, 1].
  """
  if evaluation.interpolation == "bilinear":
    pixels = _bilinear(images, evaluation)
  else:
    pixels = antialias.resize_and_crop(images, evaluation)
  return (pixels - 127.5) / 127.5


def _bilinear(
  images: UInt8[Array, "b height width 3"], evaluation: EvalPreprocessing
) -> Float32[Array, "b side side 3"]:
  """Resize and crop without antialiasing.

  Four neighbours are gathered: `jax.image.resize` multiplies by dense matrices,
  which for a photograph of 12 megapixels costs as much as a ViT-B/16.
  """
  side = evaluation.image_size
  height, width = images.shape[1:3]
  sides = jnp.stack([jnp.asarray(n, jnp.float32) for n in (height, width)])
  if evaluation.resize:
    resized = jnp.round(sides * (evaluation.resize / jnp.min(sides)))
  else:
    resized = jnp.full(2, float(side))
  # Positions in the original, of the middles of the pixels of the result.
  begins = evaluation.begin(resized)[None]
  at = jnp.arange(side, dtype=jnp.float32)[:, None] + begins + 0.5
  at = at * (sides / resized)[None] - 0.5
  pixels = images.astype(jnp.float32)
  pixels = _between(pixels, at[:, 1], axis=2)
  return _between(pixels, at[:, 0], axis=1)


def _between(
  pixels: Float32[Array, "b height width 3"],
  at: Float32[Array, " side"],
  *,
  axis: int,
) -> Float32[Array, "b _ _ 3"]:
  """Values at positions between the pixels of one axis; the edge goes on."""
  last = pixels.shape[axis] - 1
  before = jnp.floor(at)
  index = before.astype(jnp.int32)
  first = jnp.take(pixels, jnp.clip(index, 0, last), axis=axis)
  second = jnp.take(pixels, jnp.clip(index + 1, 0, last), axis=axis)
  shape = [1, 1, 1, 1]
  shape[axis] = -1
  return first + (second - first) * (at - before).reshape(shape)

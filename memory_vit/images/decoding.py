"""Decode a JPEG, PNG, WebP, BMP or GIF file to RGB pixels, by Pillow.

What Pillow gives is what TensorFlow gives, which decodes JPEG and PNG for
training and evaluation: to the bit, but for JPEG. There both are libjpeg-turbo
with smooth chroma; Pillow takes its accurate inverse transform, TensorFlow its
fast one, and they differ by one grey level on the average (docs/images.md).
"""

import io

import numpy as np
from PIL import Image, ImageChops, UnidentifiedImageError

from memory_vit.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")


def decode(encoded: bytes, formats: tuple[str, ...] = FORMATS) -> np.ndarray:
  """Decode an image file, the first of its images.

  Grey becomes RGB, of 16 bits the upper 8 are kept, alpha is dropped, and the
  orientation tag of EXIF is not applied.

  Args:
    encoded: the file. How large it may be is for the caller to ask before.
    formats: of `FORMATS`, those that are accepted.

  Returns:
    uint8 (height, width, 3).

  Raises:
    DataError: if it is none of `formats`, or broken.
  """
  try:
    with Image.open(io.BytesIO(encoded), formats=formats) as image:
      return _rgb(image)
  except Exception as error:  # Pillow raises many kinds on broken files.
    problem = "not a whole JPEG, PNG, WebP, BMP or GIF file"
    if not isinstance(error, UnidentifiedImageError):  # it names an object
      problem += f" ({str(error) or type(error).__name__})"
    raise DataError(problem) from error


def _rgb(image: Image.Image) -> np.ndarray:
  """The pixels of an opened image, uint8 (height, width, 3)."""
  if image.mode.startswith("I"):  # grey of 16 bits, which `convert` would clip
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
  if image.mode == "CMYK" and "adobe" not in image.info:
    # Pillow takes all for Adobe's, which are stored inverted.
    return np.asarray(ImageChops.invert(image).convert("RGB"))
  # Of an RGB image `convert` would be a copy.
  return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))

"""Decode a JPEG, PNG, WebP, BMP or GIF file to RGB pixels.

To the bit what training and evaluation see, where TensorFlow decodes. Of JPEG
that takes the fast inverse transform of libjpeg-turbo, which Pillow does not
offer: the pixels of its accurate one differ by one grey level on the average,
and a model that is unsure answers otherwise for one image in ten.
"""

import io

import jax
import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from memory_vit.errors import DataError
from memory_vit.images import jpeg

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
# An image beyond any of these is refused before it is decoded: a file of a few
# kilobytes can claim to be an image that fills the memory. 64 megapixels are
# those of the largest common cameras.
MAX_PIXELS = 64_000_000
MAX_SIDE = 16_384
TOO_LARGE = f"more than {MAX_PIXELS / 1e6:g} megapixels"


def decode(encoded: bytes, formats: tuple[str, ...] = FORMATS) -> np.ndarray:
  """Decode an image file, the first of its images.

  Grey becomes RGB, of 16 bits the upper 8 are kept, alpha is dropped, and the
  orientation tag of EXIF is not applied.

  Args:
    encoded: the file.
    formats: of `FORMATS`, those that are accepted.

  Returns:
    uint8 (height, width, 3).

  Raises:
    DataError: if it is none of `formats`, too large, or broken.
  """
  try:
    if encoded.startswith(jpeg.MAGIC) and "JPEG" in formats:
      return _decode_jpeg(encoded)
    with Image.open(io.BytesIO(encoded), formats=formats) as image:
      require_size(*image.size)
      return rgb(image)
  except DataError:
    raise
  except Exception as error:  # Decoders raise many kinds on broken files.
    problem = "not a whole JPEG, PNG, WebP, BMP or GIF file"
    if not isinstance(error, UnidentifiedImageError):  # it names an object
      problem += f" ({str(error) or type(error).__name__})"
    raise DataError(problem) from error


def pixels_claimed(encoded: bytes) -> int:
  """Width times height in the header of a file that `decode` would decode.

  0 of what is no image, or too large for it.
  """
  try:
    if encoded.startswith(jpeg.MAGIC):
      height, width, *_ = simplejpeg.decode_jpeg_header(encoded)
    else:
      with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        width, height = image.size
    require_size(width, height)
  except Exception:  # `decode` says what it is
    return 0
  return width * height


def require_size(width: int, height: int) -> None:
  """Raise `DataError` for an image that is too large to be decoded."""
  if width * height > MAX_PIXELS:
    raise DataError(f"{width} x {height} pixels, {TOO_LARGE}")
  if max(width, height) > MAX_SIDE:
    raise DataError(
      f"{width} x {height} pixels, a side of more than {MAX_SIDE}"
    )


def _decode_jpeg(encoded: bytes) -> np.ndarray:
  height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
  require_size(width, height)
  colours = "CMYK" if colours in ("CMYK", "YCCK") else "RGB"
  try:
    pixels = simplejpeg.decode_jpeg(encoded, colours, fastdct=True)
  except ValueError:
    # Of small damage the decoder makes the best, as TensorFlow lets it; but
    # where the end is missing, which Pillow tells from other damage.
    with Image.open(io.BytesIO(encoded), formats=("JPEG",)) as image:
      image.load()
    pixels = simplejpeg.decode_jpeg(
      encoded, colours, fastdct=True, strict=False
    )
  return _of_inks(pixels, encoded) if colours == "CMYK" else pixels


def _of_inks(inks: np.ndarray, encoded: bytes) -> np.ndarray:
  """CMYK of a JPEG file, uint8 (height, width, 4), to RGB as TensorFlow does.

  Adobe stores inks inverted: 255 is none.
  """
  with Image.open(io.BytesIO(encoded), formats=("JPEG",)) as image:
    inverted = "adobe" in image.info
  light = inks if inverted else ~inks
  rgb = light[:, :, :3].astype(np.uint16)
  rgb *= light[:, :, 3:]
  rgb //= 255
  return rgb.astype(np.uint8)


def rgb(image: Image.Image) -> np.ndarray:
  """The pixels of an opened image, uint8 (height, width, 3)."""
  if image.mode.startswith("I"):  # grey of 16 bits, which `convert` would clip
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
  # Of an RGB image `convert` would be a copy.
  return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def rgb_pixels(pixels: np.ndarray) -> np.ndarray:
  """Pixels of any shape as uint8 (height, width, 3), alpha dropped.

  Raises:
    DataError: for other shapes and types.
  """
  require_pixels(pixels)
  if pixels.ndim == 2 or pixels.shape[2] == 1:
    return np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
  return pixels[:, :, :3]


def require_pixels(pixels: np.ndarray | jax.Array) -> None:
  """Raise `DataError` for shapes and types that `rgb_pixels` does not take."""
  channels = pixels.shape[2] if pixels.ndim == 3 else 1
  if (
    pixels.dtype != np.uint8
    or pixels.ndim not in (2, 3)
    or channels not in (1, 3, 4)
    or pixels.size == 0
  ):
    raise DataError(
      "expected uint8 pixels of 0 to 255 of shape (h, w, 3), (h, w), (h, w, 1) "
      "or (h, w, 4), or a list of such arrays"
    )

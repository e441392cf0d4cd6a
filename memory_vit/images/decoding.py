"""Decode a JPEG, PNG, WebP, BMP or GIF file to RGB pixels.

Pixels are bitwise identical to those of training and evaluation, in which
TensorFlow decodes JPEG with the fast inverse DCT of libjpeg-turbo; Pillow only
offers the accurate DCT. Its pixels differ by one grey level on average, and a
model that is unsure then answers differently for one image in ten.
"""

import io

import jax
import numpy as np
import simplejpeg
from PIL import Image, ImageFile

from memory_vit.errors import DataError
from memory_vit.images import jpeg, webp
from memory_vit.images.file_kinds import why_unreadable

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
# Maximum number of pixels: the largest common cameras have 64 megapixels. An
# image with more pixels is refused before it is decoded, because a file of a
# few kilobytes can declare an image that would fill the memory.
MAX_PIXELS = 64_000_000
MAX_SIDE = 16_384
# `ImageReader` decodes images of at least this many pixels in separate threads.
LARGE_PIXELS = 4_000_000
TOO_LARGE = f"more than {MAX_PIXELS / 1e6:g} megapixels"
# Maximum number of reads of a file: Pillow reads formats other than JPEG in
# small pieces, in Python, and a hostile file could have millions of pieces. A
# PNG takes two reads per chunk; usual files of 64 MiB take < 30,000 reads.
MAX_READS = 50_000
# A run-length encoded BMP takes two reads for each run of equal pixels.
_MAX_READS_OF_RUNS = 20 * MAX_READS
# Decoding time per pixel of a run-length encoded BMP, relative to an RGB PNG.
# Pillow decodes such a BMP in Python, which is slow.
_RUN_LENGTH = 4
_RUN_LENGTH_KINDS = (1, 2)  # RLE8 and RLE4
# Modes that Pillow converts to RGB in two steps: {mode: intermediate mode}.
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
# Decoding time of an image with alpha, with Adam7 interlacing, or with 16 bits
# per channel, relative to an RGB PNG. The measured ratio was 1.3 to 1.4
# with alpha, 1.0 to 1.15 with Adam7, 1.1 to 1.2 with 16 bits, and 1.6 to 1.8
# with all three. The ratio was below 1 for palettes, grey images and GIF.
_ALPHA, _INTERLACED, _DEEP = 1.4, 1.2, 1.2


class _FewReads(io.BytesIO):
  def __init__(self, encoded: bytes) -> None:
    super().__init__(encoded)
    is_bmp = encoded.startswith(b"BM")
    self._most = self._left = _MAX_READS_OF_RUNS if is_bmp else MAX_READS

  def read(self, size: int | None = -1, /) -> bytes:
    """Read at most `size` bytes; raise `DataError` after too many reads."""
    self._left -= 1
    if self._left < 0:
      raise DataError(
        "the file has too many chunks or blocks: they take more than "
        f"{self._most:,} reads"
      )
    return super().read(size)


def decode(encoded: bytes, formats: tuple[str, ...] = FORMATS) -> np.ndarray:
  """Decode the first image of a file.

  Grey becomes RGB, 16-bit channels are cut to their upper 8 bits, and alpha is
  dropped. The EXIF orientation is not applied: see `exif`.

  Args:
    encoded: the bytes of the file.
    formats: the formats to accept, some of `FORMATS`.

  Returns:
    uint8 (height, width, 3).

  Raises:
    DataError: if the file has none of these formats, is too large, or broken.
  """
  damage = "its header is broken"
  try:
    if encoded.startswith(jpeg.MAGIC) and "JPEG" in formats:
      colours, outline = _jpeg_header(encoded)[2:]
      # Like TensorFlow, `_decode_jpeg` decodes a JPEG with small damage. It
      # raises if the damage is large, or if the JPEG has no end marker.
      damage = "it is damaged" if outline.ended else "its end is missing"
      return _decode_jpeg(encoded, colours, outline)
    with opened(encoded, formats) as image:
      _weight(image)
      damage = "it is cut or damaged"
      return rgb(image)
  except DataError:
    raise
  except Exception as error:  # broken files cause errors of many types
    raise _problem(encoded, error, damage) from error


def _problem(encoded: bytes, error: Exception, damage: str) -> DataError:
  if isinstance(error, Image.DecompressionBombError):  # over 179 megapixels
    return DataError(TOO_LARGE)
  if isinstance(error, MemoryError):
    return DataError("there is not enough memory to decode it")
  return DataError(why_unreadable(encoded, damage))


def opened(
  encoded: bytes, formats: tuple[str, ...] = FORMATS
) -> ImageFile.ImageFile:
  """Open a file, or its beginning, with Pillow; pixels are not decoded yet."""
  return Image.open(_FewReads(encoded), formats=formats)


def header(encoded: bytes) -> tuple[str, int, int]:
  """Return (format, width, height), read from the first bytes of a file.

  Raises:
    DataError: if the header cannot be read.
  """
  try:
    if encoded.startswith(jpeg.MAGIC):
      height, width, *_ = simplejpeg.decode_jpeg_header(encoded)
      return "JPEG", width, height
    if of_webp := webp.size(encoded):
      return "WEBP", *of_webp[:2]
    with opened(encoded) as image:
      return image.format or "", *image.size
  except DataError:
    raise
  except Exception as error:
    raise _problem(encoded, error, "its header is broken") from error


def pixels_claimed(encoded: bytes) -> int:
  """Return the number of pixels in the header, weighted by decoding time.

  The result is at least a third of the file size in bytes. It is exactly this
  third if the header shows that the file cannot be decoded: finding this out
  also takes time, so such files must not overtake ordinary images.
  """
  least = len(encoded) // 3
  try:
    if encoded.startswith(jpeg.MAGIC):
      width, height, _, outline = _jpeg_header(encoded)
      weight = outline.weight
    elif of_webp := webp.size(encoded):
      width, height, alpha = of_webp
      require_size(width, height)
      weight = _ALPHA if alpha else 1.0
    else:
      with opened(encoded) as image:
        (width, height), weight = image.size, _weight(image)
  except Exception:  # `decode` will report the error
    return least
  return max(int(width * height * weight), least)


def require_size(
  width: int, height: int, weight: float = 1, kind: str = ""
) -> None:
  """Raise `DataError` if an image is too large to be decoded.

  The maximum number of pixels is divided by `weight`, the decoding time per
  pixel. `kind` ends the error, and says which files have this lower maximum.
  """
  if width * height * weight > MAX_PIXELS:
    most = (
      f"more than {MAX_PIXELS / weight / 1e6:.3g} megapixels, the limit{kind}"
    )
    raise DataError(f"the image has {width} x {height} pixels, {most}")
  if max(width, height) > MAX_SIDE:
    raise DataError(
      f"the image has {width} x {height} pixels, expected at most {MAX_SIDE} "
      "on each side"
    )


def _weight(image: ImageFile.ImageFile) -> float:
  """Return the decoding time per pixel of an image, relative to an RGB PNG.

  Raise `DataError` if the image is too large. The maximum size is lower for
  run-length encoded images. Alpha, interlacing and 16 bits do not lower the
  maximum size: they only increase the decoding time.
  """
  if (
    image.format == "BMP" and image.info.get("compression") in _RUN_LENGTH_KINDS
  ):
    require_size(*image.size, _RUN_LENGTH, " for a run-length BMP")
    return _RUN_LENGTH
  require_size(*image.size)
  weight = _ALPHA if "A" in image.mode else 1.0
  if image.format == "PNG":
    weight *= _INTERLACED if image.info.get("interlace") else 1
    weight *= _DEEP if ";16" in str(image.tile) else 1
  return weight


def _jpeg_header(encoded: bytes) -> tuple[int, int, str, jpeg.Outline]:
  """Return (width, height, colour space, outline) of a JPEG.

  Raise `DataError` if the image is too large.
  """
  outline = jpeg.outline(encoded)
  height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
  kind = f" for a JPEG of {outline.scans} scans" if outline.weight > 1 else ""
  require_size(width, height, outline.weight, kind)
  return width, height, colours, outline


def _decode_jpeg(
  encoded: bytes, colours: str, outline: jpeg.Outline
) -> np.ndarray:
  colours = "CMYK" if colours in ("CMYK", "YCCK") else "RGB"
  if not outline.ended:
    raise ValueError
  pixels = simplejpeg.decode_jpeg(encoded, colours, fastdct=True, strict=False)
  return _of_inks(pixels, outline.adobe) if colours == "CMYK" else pixels


def _of_inks(inks: np.ndarray, inverted: bool) -> np.ndarray:
  """Convert CMYK pixels to RGB, as TensorFlow does.

  If `inverted`, the value 255 means no ink, as in files of Adobe programs.
  """
  light = inks if inverted else ~inks
  rgb = light[:, :, :3].astype(np.uint16)
  rgb *= light[:, :, 3:]
  rgb //= 255
  return rgb.astype(np.uint8)


def rgb(image: Image.Image) -> np.ndarray:
  """Return the pixels of an opened image, uint8 (height, width, 3).

  Raises:
    DataError: if the range of values is unknown (32-bit integers or floats).
  """
  if image.mode.startswith("I;16"):  # `convert` would clip 16-bit grey to 255
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
  if image.mode in ("I", "F"):
    raise DataError(
      f"the Pillow image has the mode {image.mode}, whose range of values is "
      "not known: expected a mode with values from 0 to 255, such as L or RGB"
    )
  if image.mode in _PREMULTIPLIED:
    image = image.convert(_PREMULTIPLIED[image.mode])
  if isinstance(image.info.get("transparency"), bytes):
    image = image.convert("RGBA")  # avoids a warning of Pillow about alpha
  # An RGB image is not converted, because `convert` would copy the image.
  return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def rgb_pixels(pixels: np.ndarray) -> np.ndarray:
  """Convert grey, RGB or RGBA pixels to RGB, uint8 (height, width, 3)."""
  require_pixels(pixels)
  if pixels.ndim == 2 or pixels.shape[2] == 1:
    return np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
  return pixels[:, :, :3]


def require_pixels(pixels: np.ndarray | jax.Array) -> None:
  """Raise `DataError` for shapes or dtypes that `rgb_pixels` cannot convert."""
  channels = pixels.shape[2] if pixels.ndim == 3 else 1
  if (
    pixels.dtype != np.uint8
    or pixels.ndim not in (2, 3)
    or channels not in (1, 3, 4)
    or pixels.size == 0
  ):
    raise DataError(
      "expected uint8 pixels (0 to 255) of shape (h, w, 3), (h, w), (h, w, 1) "
      "or (h, w, 4), or a list of such arrays"
    )

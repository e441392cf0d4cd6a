"""Decode a JPEG, PNG, WebP, BMP or GIF file to RGB pixels.

Bitwise identical to training and evaluation, in which TensorFlow decodes: it
uses the fast inverse transform of libjpeg-turbo, which Pillow does not offer.
The pixels of the accurate one differ by one grey level on average, and a model
that is unsure answers differently for one image in ten.
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
# An image beyond any of these is refused before it is decoded: a file of a few
# kilobytes can claim to be an image that fills the memory. 64 megapixels are
# those of the largest common cameras.
MAX_PIXELS = 64_000_000
MAX_SIDE = 16_384
# Smaller images do not wait for those of as many pixels, or more.
LARGE_PIXELS = 4_000_000
TOO_LARGE = f"more than {MAX_PIXELS / 1e6:g} megapixels"
# Pillow reads other files than JPEG piece by piece, in Python: twice for a
# chunk of a PNG. Ordinary files of 64 MiB take less than 30,000, but a BMP two
# for each run of pixels.
MAX_READS = 50_000
_MAX_READS_OF_RUNS = 20 * MAX_READS
# Its decoder of run-length encoded BMP files, in Python too, is slower than
# others by this factor.
_RUN_LENGTH = 4
_RUN_LENGTH_KINDS = (1, 2)
# Modes of Pillow that it does not convert to RGB at once.
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
# Measured for photographs and plain areas, each rounded up: alpha (PNG and WebP
# 1.3 to 1.4), Adam7 (1.0 to 1.15), 16 bits a channel (1.1 to 1.2), all three
# together 1.6 to 1.8. Palettes, grey and GIF take less than RGB; of animations
# the first frame alone is decoded.
_ALPHA, _INTERLACED, _DEEP = 1.4, 1.2, 1.2


class _FewReads(io.BytesIO):
  def __init__(self, encoded: bytes) -> None:
    super().__init__(encoded)
    runs = encoded.startswith(b"BM")
    self._most = self._left = _MAX_READS_OF_RUNS if runs else MAX_READS

  def read(self, size: int | None = -1, /) -> bytes:
    """Raise `DataError` after too many reads."""
    self._left -= 1
    if self._left < 0:
      raise DataError(
        f"chunks or blocks that take more than {self._most:,} reads"
      )
    return super().read(size)


def decode(encoded: bytes, formats: tuple[str, ...] = FORMATS) -> np.ndarray:
  """Decode an image file, the first of its images.

  Grey becomes RGB, of 16 bits the upper 8 are kept, alpha is dropped, and the
  image is not turned: see `exif`.

  Args:
    encoded: the file.
    formats: of `FORMATS`, those that are accepted.

  Returns:
    uint8 (height, width, 3).

  Raises:
    DataError: if it is none of `formats`, too large, or broken.
  """
  damage = "its header is broken"
  try:
    if encoded.startswith(jpeg.MAGIC) and "JPEG" in formats:
      colours, outline = _jpeg_header(encoded)[2:]
      # Of small damage the decoder makes the best, as TensorFlow lets it, but
      # not of a file that was cut.
      damage = "it is damaged" if outline.ended else "its end is missing"
      return _decode_jpeg(encoded, colours, outline)
    with opened(encoded, formats) as image:
      _weight(image)
      damage = "it is cut or damaged"
      return rgb(image)
  except DataError:
    raise
  except Exception as error:  # Decoders raise many kinds on broken files.
    raise _problem(encoded, error, damage) from error


def _problem(encoded: bytes, error: Exception, damage: str) -> DataError:
  if isinstance(error, Image.DecompressionBombError):  # from 179 megapixels on
    return DataError(TOO_LARGE)
  if isinstance(error, MemoryError):
    return DataError("there is not enough memory to decode it")
  return DataError(why_unreadable(encoded, damage))


def opened(
  encoded: bytes, formats: tuple[str, ...] = FORMATS
) -> ImageFile.ImageFile:
  """Open a file, or the beginning of one, by Pillow; nothing is decoded yet."""
  return Image.open(_FewReads(encoded), formats=formats)


def header(encoded: bytes) -> tuple[str, int, int]:
  """Format, width and height of a file, of which the beginning may do.

  Raises:
    DataError: if they cannot be read.
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
  """Width times height in the header of a file that `decode` would decode.

  More for a file whose pixels take longer than those of others, or three bytes
  each; 0 for what is no image, or too large.
  """
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
  except Exception:  # `decode` says what it is
    return 0
  return max(int(width * height * weight), len(encoded) // 3)


def require_size(
  width: int, height: int, weight: float = 1, kind: str = ""
) -> None:
  """Raise `DataError` for an image that is too large to be decoded.

  A pixel of a file of this `kind` takes `weight` times as long as usual.
  """
  if width * height * weight > MAX_PIXELS:
    most = f"more than {MAX_PIXELS / weight / 1e6:.3g} megapixels{kind}"
    raise DataError(f"{width} x {height} pixels, {most}")
  if max(width, height) > MAX_SIDE:
    raise DataError(
      f"{width} x {height} pixels, a side of more than {MAX_SIDE}"
    )


def _weight(image: ImageFile.ImageFile) -> float:
  """Decoding time per pixel, relative to an RGB PNG; refuse what takes long.

  Alpha and the like decide what waits for what; no image is refused for them.
  """
  if (
    image.format == "BMP" and image.info.get("compression") in _RUN_LENGTH_KINDS
  ):
    require_size(*image.size, _RUN_LENGTH, " of a run-length BMP")
    return _RUN_LENGTH
  require_size(*image.size)
  weight = _ALPHA if "A" in image.mode else 1.0
  if image.format == "PNG":
    weight *= _INTERLACED if image.info.get("interlace") else 1
    weight *= _DEEP if ";16" in str(image.tile) else 1
  return weight


def _jpeg_header(encoded: bytes) -> tuple[int, int, str, jpeg.Outline]:
  """Width, height, colours and markers of a file that may be decoded."""
  outline = jpeg.outline(encoded)
  height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
  kind = f" of a JPEG of {outline.scans} scans" if outline.weight > 1 else ""
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
  """CMYK to RGB as TensorFlow does; Adobe stores inks inverted: 255 is none."""
  light = inks if inverted else ~inks
  rgb = light[:, :, :3].astype(np.uint16)
  rgb *= light[:, :, 3:]
  rgb //= 255
  return rgb.astype(np.uint8)


def rgb(image: Image.Image) -> np.ndarray:
  """The pixels of an opened image, uint8 (height, width, 3).

  Raises:
    DataError: for numbers of which nobody states the range.
  """
  if image.mode.startswith("I;16"):  # grey, which `convert` would clip
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
  if image.mode in ("I", "F"):
    raise DataError(
      f"its image of Pillow has the mode {image.mode}, whose range is not "
      "known: expected grey or colours of 0 to 255, such as the mode L or RGB"
    )
  if image.mode in _PREMULTIPLIED:
    image = image.convert(_PREMULTIPLIED[image.mode])
  if isinstance(image.info.get("transparency"), bytes):
    image = image.convert("RGBA")  # else Pillow warns that it drops alpha
  # Of an RGB image `convert` would be a copy.
  return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def rgb_pixels(pixels: np.ndarray) -> np.ndarray:
  """Pixels of any shape as uint8 (height, width, 3), alpha dropped."""
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

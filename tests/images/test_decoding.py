"""Files decode to the pixels that training and evaluation see."""

import io

import memory
import numpy as np
import pytest
import tensorflow as tf
from fake_data import encode, every_kind, noise
from PIL import Image

from memory_vit.data import image_ops
from memory_vit.errors import DataError
from memory_vit.images import decoding, preparation, webp
from memory_vit.model.task import EvalPreprocessing

pytestmark = pytest.mark.versions

ADOBE = b"\xff\xee\x00\x0eAdobe"


def cmyk_of_nobody() -> bytes:
  """A CMYK JPEG without Adobe's marker: 0 is white in it."""
  image = Image.fromarray(noise(0, 5, 7)).resize((42, 30))
  encoded = encode(image.convert("CMYK"), "JPEG")
  start = encoded.index(ADOBE)
  return encoded[:start] + encoded[start + 16 :]


@pytest.mark.fault("unequal-preprocessing")
def test_every_kind_is_what_tensorflow_decodes():
  kinds = {**every_kind(), "jpeg-cmyk-of-nobody": cmyk_of_nobody()}
  for name, encoded in kinds.items():
    found = decoding.decode(encoded)
    assert found.dtype == np.uint8
    assert np.array_equal(found, image_ops.decode(encoded)), name


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [30, 75, 98])
def test_jpeg_of_all_qualities(subsampling, quality):
  """To the bit, where an accurate inverse transform is some levels off."""
  options = {"subsampling": subsampling, "quality": quality}
  for shape in ((45, 61), (1, 9), (16, 3)):
    encoded = encode(noise(1, *shape), "JPEG", **options)
    found = decoding.decode(encoded)
    assert np.array_equal(found, image_ops.decode(encoded))
  with Image.open(io.BytesIO(encoded)) as image:
    assert not np.array_equal(found, np.asarray(image))


def test_a_jpeg_with_small_damage_is_decoded_as_tensorflow_does():
  """What can be saved is; a file whose end is missing too is refused."""
  encoded = bytearray(encode(noise(1, 40, 40), "JPEG"))
  encoded[700:720] = range(20)
  found = decoding.decode(bytes(encoded))
  assert np.array_equal(found, image_ops.decode(bytes(encoded)))
  whole = encode(noise(1, 40, 40), "JPEG")
  for cut in (bytes(encoded[:900]), bytes(encoded[:1100]), whole[:-2]):
    with pytest.raises(DataError, match="not a whole JPEG"):
      decoding.decode(cut)
    with pytest.raises(tf.errors.InvalidArgumentError):
      image_ops.decode(cut)


def test_a_jpeg_is_as_large_as_its_decoder_takes_it(monkeypatch):
  """The limit holds for what is decoded, whatever another reader has seen."""
  monkeypatch.setattr(decoding, "MAX_PIXELS", 60 * 30 - 1)
  with pytest.raises(DataError, match="60 x 30 pixels, more than"):
    decoding.decode(encode(noise(0, 30, 60), "JPEG"))


def test_grey_of_16_bits_keeps_the_upper_8():
  values = np.random.default_rng(0).integers(0, 2**16, (9, 7), np.uint16)
  found = decoding.decode(encode(values, "PNG"))
  np.testing.assert_array_equal(found, np.stack([values >> 8] * 3, axis=-1))


@pytest.mark.parametrize("size", [(1, 1), (301, 40), (16383, 1)])
@pytest.mark.parametrize(
  ("mode", "options"),
  [
    ("RGB", {}),
    ("RGBA", {}),
    ("RGB", {"lossless": True}),
    ("RGBA", {"lossless": True}),
    ("RGB", {"exif": b"Exif\0\0"}),
    ("RGB", {"save_all": True}),
  ],
  ids=["lossy", "alpha", "lossless", "lossless alpha", "chunks", "animated"],
)
def test_the_size_of_a_webp_is_in_its_first_bytes(mode, options, size):
  colour = (9, 200, 3, 100)[: len(mode)]
  if options.get("save_all"):
    options = {**options, "append_images": [Image.new(mode, size, "red")]}
  encoded = encode(Image.new(mode, size, colour), "WEBP", **options)
  with Image.open(io.BytesIO(encoded)) as image:
    assert webp.size(encoded[:30]) == (*image.size, image.mode == "RGBA")
  assert decoding.header(encoded[:30]) == ("WEBP", *size)
  for other in (encoded[:11], b"RIFF\4\0\0\0WAVE" + encoded[12:], b""):
    assert webp.size(other) is None


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", ""])
def test_broken_files_are_refused(kind):
  whole = encode(noise(0), kind) if kind else b"neither picture nor text"
  for encoded in (whole[: len(whole) // 2], whole[:10], b""):
    with pytest.raises(DataError) as error:
      decoding.decode(encoded)
    said = str(error.value)
    if kind and encoded:
      assert said.lower().startswith(f"not a whole {kind.lower()} file: it")
    else:
      assert said.startswith("not a JPEG, PNG, WebP, BMP or GIF file")


@pytest.mark.parametrize(
  ("kind", "mode", "options"),
  [
    ("JPEG", "RGB", {}),
    ("JPEG", "CMYK", {"progressive": True}),
    ("PNG", "RGBA", {"compress_level": 1}),
    ("PNG", "P", {}),
    ("WEBP", "RGBA", {"lossless": True, "method": 0}),
    ("BMP", "P", {}),
    ("GIF", "P", {}),
  ],
)
def test_decoding_takes_the_memory_that_is_set_aside(kind, mode, options):
  side = 1200
  image = Image.fromarray(noise(0, 60, 60)).resize((side, side)).convert(mode)
  encoded = encode(image, kind, **options)
  decoding.decode(encode(image.resize((9, 9)), kind))  # the reader is loaded
  preprocessing = EvalPreprocessing(image_size=8)
  room = preparation.bytes_needed(io.BytesIO(encoded), preprocessing)
  before = memory.start_rss()
  pixels = decoding.decode(encoded)
  assert pixels.shape == (side, side, 3)
  # Beside that `read` sets two copies of the file aside.
  assert memory.peak_rss() - before <= room + 2 * len(encoded)

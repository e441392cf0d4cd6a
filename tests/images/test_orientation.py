"""Files that a person supplies are turned as their EXIF says."""

import io
import itertools
import struct
import time

import numpy as np
import pytest
import tensorflow as tf
from fake_data import encode, noise
from PIL import Image, ImageOps

import memory_vit as mv
from memory_vit.config import DataConfig
from memory_vit.data import (
  batching,
  image_ops,
  in_memory,
  indexable,
  oriented,
  random_decisions,
)
from memory_vit.data.datasets import open_split
from memory_vit.images import decoding, exif
from memory_vit.model.task import EvalPreprocessing

ALL = range(1, 9)
KINDS = ("JPEG", "PNG", "PNG, EXIF behind", "WEBP")
EVALUATIONS = [
  EvalPreprocessing(image_size=9),
  # The margins are odd, so that a turned crop is another one.
  EvalPreprocessing(image_size=9, crop="central", resize=14),
  EvalPreprocessing(
    image_size=9, crop="central_rounded", resize=14, interpolation="bicubic"
  ),
]


def tag(number):
  found = Image.Exif()
  found[0x0112] = number
  return found


def stored(number, kind="PNG", pixels=None):
  """A file of pixels that are to be turned by an orientation."""
  pixels = noise(3, 21, 34) if pixels is None else pixels
  if kind != "PNG, EXIF behind":
    options = {"lossless": True} if kind == "WEBP" else {}
    return encode(pixels, kind, exif=tag(number), **options)
  encoded = encode(pixels, "PNG", exif=tag(number))
  start = encoded.index(b"eXIf") - 4
  end = start + 12 + int.from_bytes(encoded[start : start + 4], "big")
  return encoded[:start] + encoded[end:-12] + encoded[start:end] + encoded[-12:]


def upright(encoded):
  """The pixels as Pillow turns them, decoded by us."""
  with Image.open(io.BytesIO(encoded)) as image:
    image.load()
    whole = Image.fromarray(decoding.decode(encoded))
    whole.info["exif"] = image.getexif().tobytes()
  return np.asarray(ImageOps.exif_transpose(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_predict_sees_what_was_stored_upright(kind):
  for number, preprocessing in itertools.product(ALL, EVALUATIONS):
    encoded = stored(number, kind)
    expected = mv.preprocess(upright(encoded), preprocessing)
    np.testing.assert_array_equal(
      mv.preprocess(encoded, preprocessing), expected
    )
    assert exif.orientation(encoded) == number


@pytest.mark.fault("unequal-preprocessing")
def test_folders_lists_and_python_see_what_predict_sees(tmp_path):
  files = [stored(i, kind) for kind in KINDS for i in ALL]
  (tmp_path / "train/a").mkdir(parents=True)
  (tmp_path / "train/b").mkdir()
  names = [f"train/{'ab'[i % 2]}/{i}.png" for i in range(len(files))]
  for name, encoded in zip(names, files, strict=True):
    (tmp_path / name).write_bytes(encoded)
  (tmp_path / "mine.txt").write_text("".join(f"{n} 0\n" for n in names))
  pairs = [(encoded, 0) for encoded in files]
  about = {"name": "own", "version": "1", "class_names": ["a", "b"]}
  splits = [
    open_split("folder", "train", str(tmp_path)),
    open_split("list", "mine", str(tmp_path)),
    in_memory.open_data(pairs, "own", "train"),
    indexable.open_indexable([({"bytes": e}, 0) for e, _ in pairs], **about),
  ]
  preprocessing = EVALUATIONS[1]
  expected = mv.preprocess(files, preprocessing)

  def in_order(images):
    return images[np.lexsort(images.reshape(len(images), -1).T)]

  for split in splits:
    found = batching.eval_images(split, preprocessing, range(len(files)))
    np.testing.assert_array_equal(in_order(found), in_order(expected))


@pytest.mark.parametrize("crop", ["inception", "small", "resize"])
def test_a_training_crop_is_that_of_the_upright_image(crop):
  data = DataConfig(train_crop=crop, resize=14)

  @tf.function(input_signature=[tf.TensorSpec((), tf.string)])
  def views(encoded):
    uniforms = tf.constant(random_decisions.uniforms(3, range(4)))
    one = lambda uniforms: image_ops.train_image(  # noqa: E731
      encoded, uniforms, data=data, image_size=9
    )
    return tf.map_fn(one, uniforms, fn_output_signature=tf.float32)

  for number in ALL:
    encoded = stored(number)
    expected = views(encode(upright(encoded), "PNG"))
    found = views(oriented.mark(encoded))
    np.testing.assert_array_equal(found, expected, err_msg=str(number))


@pytest.mark.parametrize("number", ALL)
def test_the_part_of_a_jpeg_that_is_decoded_is_the_right_one(number):
  encoded = stored(number, "JPEG", noise(0, 60, 90))
  whole = encode(upright(encoded), "PNG")
  for uniforms in random_decisions.uniforms(0, range(4)):
    part = image_ops.inception_crop(oriented.mark(encoded), uniforms)
    cut = image_ops.inception_crop(whole, uniforms)
    # At the rim, the colours of a JPEG depend on the pixels that are not read.
    np.testing.assert_array_equal(part[1:-1, 1:-1], cut[1:-1, 1:-1])


def test_images_read_by_tensorflow_and_pillow_are_not_turned_again():
  encoded = stored(6)
  pixels = decoding.decode(encoded)
  np.testing.assert_array_equal(image_ops.decode(encoded), pixels)
  examples = tf.data.Dataset.from_tensors((encoded, 0)).repeat(3)
  with Image.open(io.BytesIO(encoded)) as image:
    for data in (examples.take(3), [(image, 0)] * 3):
      split = in_memory.open_data(data, "own", "train", ("a", "b"))
      file, _ = split.source.read(1)
      np.testing.assert_array_equal(image_ops.decode(file), pixels)


def ifd(fields, order="<", start=8, count=None, more=b""):
  head = b"II*\0" if order == "<" else b"MM\0*"
  count = len(fields) if count is None else count
  return (
    head + struct.pack(f"{order}I", start)
    + struct.pack(f"{order}H", count)
    + b"".join(struct.pack(f"{order}HHI4s", *field) for field in fields) + more
  )  # fmt: skip


SIX = struct.pack("<H", 6)
BLOCKS = {
  "little": (ifd([(0x112, 3, 1, SIX)]), 6),
  "big": (ifd([(0x112, 3, 1, b"\0\6")], ">"), 6),
  "a long": (ifd([(0x112, 4, 1, struct.pack("<I", 6))]), 6),
  "behind others": (ifd([(0x10F, 2, 2**31, b"abcd"), (0x112, 3, 1, SIX)]), 6),
  "with the prefix of JPEG": (b"Exif\0\0" + ifd([(0x112, 3, 1, SIX)]), 6),
  "none": (ifd([]), 1),
  "0": (ifd([(0x112, 3, 1, b"\0\0")]), 1),
  "9": (ifd([(0x112, 3, 1, b"\t\0")]), 1),
  "text": (ifd([(0x112, 2, 1, b"6\0")]), 1),
  "two": (ifd([(0x112, 3, 2, SIX + SIX)]), 1),
  "a type that is none": (ifd([(0x112, 99, 1, SIX)]), 1),
  "other order": (ifd([(0x112, 3, 1, b"\0\6")]), 1),
  "no TIFF": (b"II+\0" + bytes(40), 1),
  "cut": (ifd([(0x112, 3, 1, SIX)])[:15], 1),
  "empty": (b"", 1),
  "far": (ifd([(0x112, 3, 1, SIX)], start=2**32 - 1), 1),
  "of itself": (ifd([(0x112, 3, 1, SIX)], start=0), 1),
  "fewer than it says": (ifd([(0x112, 3, 1, SIX)], count=65_535), 6),
  "next is itself": (ifd([(0x100, 3, 1, SIX)], more=struct.pack("<I", 8)), 1),
  "many": (ifd([(7, 2, 2**31, b"\x08")] * 5_000), 1),
}


@pytest.mark.fault("broken-image")
@pytest.mark.parametrize("name", BLOCKS)
def test_broken_exif_never_fails_an_image(name):
  block, expected = BLOCKS[name]
  pixels = noise(0, 8, 8)
  plain = EVALUATIONS[0]
  for kind in ("PNG", "WEBP", "JPEG"):
    options = {"lossless": True} if kind == "WEBP" else {}
    if kind == "JPEG":
      block = b"Exif\0\0" + block.removeprefix(b"Exif\0\0")
    encoded = encode(pixels, kind, exif=block, **options)
    assert exif.orientation(encoded) == expected, kind
    mv.preprocess(encoded, plain)


@pytest.mark.fault("slow-image")
def test_orientation_is_read_at_once_whatever_a_stranger_wrote():
  png = encode(noise(0), "PNG")
  block = ifd([(7, 2, 2**31, b"\x08")], count=65_535, more=bytes(65_534 * 12))
  chunk = struct.pack(">I4s", 0, b"teST") + bytes(4)
  hostile = [
    encode(noise(0), "PNG", exif=block),
    png[:33] + chunk * 10**6 + png[33:],
    b"RIFF\0\0\0\0WEBP" + (b"ANMF" + bytes(4)) * 10**6,
    b"\xff\xd8" + b"\xff\xfe\0\2" * 10**6,
    b"\xff\xd8" + b"\xff" * 10**7,
  ]
  for encoded in hostile:
    begun = time.process_time()
    assert exif.orientation(encoded) == 1
    assert time.process_time() - begun < 0.5


def test_xmp_alone_turns_nothing():
  """As in browsers, which show what the page shows beside it."""
  xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>'
  encoded = encode(noise(0), "JPEG", xmp=xmp)
  assert exif.orientation(encoded) == 1

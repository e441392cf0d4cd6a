"""Decoded images that are kept: the same examples, without their files."""

import itertools
import types

import fake_data
import numpy as np
import psutil
import pytest

from memory_vit.config import DataConfig
from memory_vit.data import (
  batching,
  datasets,
  decoded_images,
  image_ops,
  random_decisions,
  raw_images,
)
from memory_vit.data.decoded_images import cache_decoded
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.errors import BrokenDataError, ConfigError

SIZES = [(20, 30), (48, 33), (16, 16), (90, 40)]


@pytest.fixture
def folder(tmp_path):
  """Two classes of images of several sizes."""
  for i, (height, width) in enumerate(SIZES):
    for label in "ab":
      directory = tmp_path / "train" / label
      directory.mkdir(parents=True, exist_ok=True)
      picture = fake_data.noise(10 * i + ord(label), height, width)
      encoded = fake_data.encode(picture, "PNG")
      (directory / f"{i}.png").write_bytes(encoded)
  return tmp_path


def opened(folder, **options):
  return datasets.open_split("folder", "train", str(folder), **options)


def batches_of(reader, crop):
  made = batching.train_batches(
    reader, DataConfig(train_crop=crop, resize=20), image_size=16,
    batch_size=6, seed=3,
  )  # fmt: skip
  found = list(itertools.islice(made, 3))
  made.close()
  return found


@pytest.mark.parametrize(
  "crop",
  [
    "small",
    pytest.param("inception", marks=pytest.mark.slow),
    pytest.param("resize", marks=pytest.mark.slow),
  ],
)
def test_images_that_are_small_enough_give_the_same_bits(folder, crop):
  """Order, crops, labels and pixels; and no file is read again."""
  expected = batches_of(opened(folder), crop)
  kept = cache_decoded(opened(folder), 90)
  for path in folder.rglob("*.png"):
    path.unlink()
  for one, other in zip(batches_of(kept, crop), expected, strict=True):
    np.testing.assert_array_equal(one["label"], other["label"])
    np.testing.assert_array_equal(one["image"], other["image"])


@pytest.mark.slow
def test_larger_images_are_resized_as_the_small_crop_does(folder):
  expected = batches_of(opened(folder), "small")
  found = batches_of(cache_decoded(opened(folder), 20), "small")
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one["label"], other["label"])
    # Rounded to whole grey levels, of which 127.5 are 1.
    np.testing.assert_allclose(
      one["image"], other["image"], atol=0.5 / 127.5 + 1e-6
    )


@pytest.mark.slow
def test_undecodable_images_are_replaced_as_without_a_cache(folder):
  (folder / "train/a/1.png").write_bytes(b"no image")
  with pytest.raises(BrokenDataError, match="cannot be read"):
    cache_decoded(opened(folder), 90)
  expected = opened(folder, max_bad=1)
  first = batches_of(expected, "small")
  reader = opened(folder, max_bad=1)
  kept = cache_decoded(reader, 90)
  # What it is told before the first batch is what a state notes.
  assert dict(reader.unreadable).keys() == dict(expected.unreadable).keys()
  for one, other in zip(batches_of(kept, "small"), first, strict=True):
    np.testing.assert_array_equal(one["image"], other["image"])
    np.testing.assert_array_equal(one["label"], other["label"])


def test_cache_beyond_the_memory_is_refused_while_it_is_filled(
  folder, monkeypatch
):
  memory = types.SimpleNamespace(total=2**30, available=2**20)
  monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
  monkeypatch.setattr(decoded_images, "_AT_ONCE", 2)
  with pytest.raises(ConfigError, match=r"8 decoded .* the first 2\), but"):
    cache_decoded(opened(folder), 90)


def test_raw_image_with_a_false_header_is_refused():
  """Whatever may be wrong with one, nothing is read behind its end."""
  image = fake_data.noise(0, 4, 5)
  encoded = raw_images.encode(np.asarray(image))
  np.testing.assert_array_equal(image_ops.decode(encoded), image)
  start = len(raw_images.MAGIC)
  pixels = encoded[start + 8 :]
  many = raw_images.MAGIC + b"\xff\xff\xff\x7f" * 2 + pixels
  negative = raw_images.MAGIC + b"\xff\xff\xff\xff" * 2 + pixels
  for broken in (encoded[:-1], encoded[: start + 4], many, negative):
    with pytest.raises(tf.errors.InvalidArgumentError):
      image_ops.decode(tf.constant(broken))
  [uniforms] = random_decisions.uniforms(0, [1])
  for broken in (encoded[: start + 4], many):
    with pytest.raises(tf.errors.InvalidArgumentError):
      image_ops.inception_crop(tf.constant(broken), uniforms)

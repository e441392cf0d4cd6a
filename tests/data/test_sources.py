"""Examples in memory, without TensorFlow: the same bits as by tf.data."""

import dataclasses
import itertools
import threading

import fake_data
import numpy as np
import pytest
import tensorflow as tf
from fake_data import encode, noise

from memory_vit.config import DataConfig
from memory_vit.data import (
  batching,
  datasets,
  decoded_images,
  graph_source,
  image_ops,
  in_memory,
  memory_source,
  numpy_ops,
  pipeline,
  random_decisions,
  raw_images,
  subset,
)
from memory_vit.data.preparations import EvalImage
from memory_vit.errors import BrokenDataError
from memory_vit.model.task import EvalPreprocessing

# Some are smaller than crops, some as long as crops allow.
SIZES = [(20, 30), (48, 33), (16, 16), (90, 40), (1, 9), (130, 5)]
EVALUATIONS = [
  EvalPreprocessing(image_size=16),
  EvalPreprocessing(image_size=16, crop="central", resize=19),
  EvalPreprocessing(image_size=16, interpolation="bicubic"),
]


@pytest.fixture(scope="module")
def both():
  """A split of several sizes and kinds of images, by tf.data and in memory."""
  kinds = ("PNG", "WEBP", "BMP")
  images = [
    encode(noise(i, *size), kinds[i % 3]) for i, size in enumerate(SIZES)
  ]
  images.append(raw_images.encode(noise(8, 40, 25)))
  split = fake_data.numbered_source(len(images))
  return [
    dataclasses.replace(split, source=source)
    for source in (
      graph_source.from_tensors(tf.constant(images), tf.range(len(images))),
      memory_source.MemorySource(images, np.arange(len(images), dtype="i4")),
    )
  ]


def trained_on(split, steps=5, crop="inception", flip=True, start=0):
  data = DataConfig(train_crop=crop, resize=20, flip=flip)
  batches = batching.train_batches(
    split, data, image_size=16, batch_size=4, seed=3, start=start
  )
  found = list(itertools.islice(batches, steps))
  batches.close()
  return found


def assert_same(found, expected):
  for one, other in zip(found, expected, strict=True):
    assert one.keys() == other.keys()
    for key, values in one.items():
      assert values.dtype == other[key].dtype
      np.testing.assert_array_equal(values, other[key], err_msg=key)


@pytest.mark.parametrize("crop", ["inception", "small", "resize"])
def test_training_batches_are_those_of_tf_data(both, crop):
  assert_same(*(trained_on(split, crop=crop) for split in both))


@pytest.mark.parametrize("preprocessing", EVALUATIONS)
def test_evaluation_images_are_those_of_tf_data(both, preprocessing):
  found = [
    list(batching.eval_batches(split, preprocessing, batch_size=4))
    for split in both
  ]
  assert_same(*found)
  chosen = [
    batching.eval_images(split, preprocessing, [3, 0, 3]) for split in both
  ]
  np.testing.assert_array_equal(*chosen)


def test_crops_of_examples_in_python_are_those_of_their_folder(tmp_path):
  """Order, crops and bits of a folder, given as a list of paths."""
  for i, (height, width) in enumerate(SIZES):
    for label in "ab":
      path = tmp_path / "train" / label / f"{i}.png"
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(encode(noise(10 * i + ord(label), height, width), "PNG"))
  folder = datasets.open_split("folder", "train", str(tmp_path))
  files = [folder.file_name(i) for i in range(folder.size)]
  pairs = files, folder.labels
  split = in_memory.open_data(pairs, "own", "train", ("a", "b"))
  for crop in ("inception", "small"):
    assert_same(trained_on(split, crop=crop), trained_on(folder, crop=crop))


def test_images_keep_their_labels_in_parts_and_with_other_numbers(both):
  """The label of each example is its index."""
  chosen, numbers = [5, 0, 2], np.arange(7, dtype=np.int32)[::-1]
  for split in both:
    part = subset.take(split, np.array(chosen), "part", split.data_files)
    source = part.source.renumbered(numbers)
    labels = numbers[chosen].tolist()
    for place, index in enumerate(chosen):
      image, label = source.read(place)
      assert image == split.source.read(index)[0]
      assert label == labels[place]
    assert [int(label) for label in source.labels(range(3))] == labels
    found = source.examples(EvalImage(EVALUATIONS[0]), range(3))
    assert [int(label) for _, label in found] == labels


def test_parts_of_a_jpeg_differ_at_their_rim_alone():
  encoded = encode(noise(0, 60, 90), "JPEG")
  for uniforms in random_decisions.uniforms(0, range(10)):
    found = numpy_ops.inception_crop(numpy_ops.decode(encoded), uniforms)
    part = image_ops.inception_crop(encoded, uniforms).numpy()
    assert found.shape == part.shape
    np.testing.assert_array_equal(found[1:-1, 1:-1], part[1:-1, 1:-1])


def test_decoded_images_are_those_of_tf_data(both):
  by_graph, by_threads = (
    decoded_images.cache_decoded(split, 20) for split in both
  )
  for i in range(by_graph.size):
    assert by_graph.source.read(i)[0] == by_threads.source.read(i)[0]
  assert_same(trained_on(by_threads), trained_on(by_graph))


@pytest.mark.fault("broken-image")
def test_unreadable_examples_are_replaced_and_named():
  whole = fake_data.broken_source(9, [2, 3, 8], max_bad=3)
  split = fake_data.in_memory(whole)
  assert_same(trained_on(split, steps=7), trained_on(whole, steps=7))
  assert split.unreadable.keys() == {2, 3, 8}
  assert "not a JPEG, PNG" in split.unreadable[2]
  # Of a later position, too: the result depends on the numbers alone.
  assert_same(trained_on(split, start=8), trained_on(whole, start=8))
  strict = dataclasses.replace(split, max_bad=2, unreadable={})
  batches = batching.eval_batches(strict, EVALUATIONS[0], batch_size=9)
  with pytest.raises(BrokenDataError, match="3 examples cannot be read"):
    next(batches)


def test_two_batches_are_made_ahead_and_threads_end_with_them(monkeypatch):
  split = fake_data.in_memory(fake_data.numbered_source(40))
  begun = set()
  uniforms = random_decisions.uniforms

  def noted(seed, numbers):
    begun.add(int(numbers[0]))
    return uniforms(seed, numbers)

  monkeypatch.setattr(random_decisions, "uniforms", noted)
  batches = batching.train_batches(
    split, DataConfig(), image_size=8, batch_size=4, seed=0
  )
  assert not begun
  for last in (8, 12):
    next(batches)
    assert begun == {*range(0, last + 1, 4)}
  pipeline.close_batches()
  names = [thread.name for thread in threading.enumerate()]
  assert not [name for name in names if "memory_vit-examples" in name]

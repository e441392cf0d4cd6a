"""Batches for training and evaluation, by example number."""

from collections.abc import Iterator

import tensorflow as tf

from memory_vit.config import TrainDataConfig
from memory_vit.data import image_ops, pipeline
from memory_vit.data.pipeline import Batch, Recipe
from memory_vit.data.sources import Source
from memory_vit.errors import ConfigError
from memory_vit.model.task import EvalPreprocessing


def train_batches(
  source: Source,
  data: TrainDataConfig,
  *,
  image_size: int,
  batch_size: int,
  seed: int,
  start: int = 0,
  process_index: int = 0,
  process_count: int = 1,
) -> Iterator[Batch]:
  """Batches for training, without end.

  Each epoch is a permutation of the source. Epochs follow each other without a
  gap: a batch may hold the end of one and the start of the next, and a source
  may be smaller than a batch.

  Args:
    source: the examples.
    data: how pictures are cropped and mirrored.
    image_size: s, side of the square, in pixels.
    batch_size: b, of all processes together.
    seed: of the order, and of the crops.
    start: examples that were used before; training that stopped after k steps
      goes on exactly with k * batch_size.
    process_index: this process, which gets the rows i * b / p ... of a batch.
    process_count: p.

  Returns:
    Iterator over {"image": float32 (b / p, s, s, 3) in [-1, 1], "label": int32
    (b / p,)}. Where `source.max_bad` allows it, the next readable example of
    the source takes the place of one that cannot be read. The iterator raises a
    `BrokenDataError` that names the pictures if more cannot be read, or if one
    has no label.

  Raises:
    ConfigError: if the batch does not divide, or the crop is impossible.
  """
  _check_rows(batch_size, process_index, process_count)
  if data.train_crop == "small":
    image_ops.shorter_side(data.resize, image_size)

  def record(number: tf.Tensor) -> tf.Tensor:
    return _shuffled(number, source.size, seed)

  def prepare(
    number: tf.Tensor, encoded: tf.Tensor, label: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    key = tf.stack([tf.constant(seed, tf.int64), number])
    image = image_ops.train_image(
      encoded, key, data=data, image_size=image_size
    )
    return {"image": image, "label": label}

  rows = batch_size // process_count
  firsts = range(start + process_index * rows, 2**63 - batch_size, batch_size)
  return pipeline.batches(Recipe(source, record, prepare), firsts, rows)


def train_examples(
  source: Source, *, seed: int, batch_size: int, step: int
) -> list[str]:
  """What `train_batches` puts into the batch of a step: indices, and files.

  Of examples that cannot be read, what takes their place; as far as this
  process knows of them.

  Args:
    source: the examples.
    seed: as in `train_batches`; so is batch_size.
    batch_size: see there.
    step: from 1.
  """
  numbers = range((step - 1) * batch_size, step * batch_size)
  names = []
  for number in numbers:
    index = int(_shuffled(tf.constant(number, tf.int64), source.size, seed))
    while index in source.left_out:
      index = (index + 1) % source.size
    names.append(f"{index} {source.file_name(index)}".strip())
  return names


def eval_batches(
  source: Source,
  preprocessing: EvalPreprocessing,
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
) -> Iterator[Batch]:
  """Batches with every example exactly once, in order.

  The last batch is filled up by repeating the last example, with mask 0. All
  processes get the same number of batches.

  Args:
    source: the examples.
    preprocessing: s is its `image_size`.
    batch_size: b, of all processes together.
    process_index: this process, which gets the rows i * b / p ... of a batch.
    process_count: p.

  Returns:
    Iterator over {"image": float32 (b / p, s, s, 3) in [-1, 1], "label": int32
    (b / p,), "mask": float32 (b / p,)}. An example that cannot be read has
    mask 0, where `source.max_bad` allows it. The iterator raises a
    `BrokenDataError` that names the pictures if more cannot be read, or if one
    has no label.

  Raises:
    ConfigError: if the batch does not divide.
  """
  _check_rows(batch_size, process_index, process_count)

  def record(number: tf.Tensor) -> tf.Tensor:
    return tf.minimum(number, source.size - 1)

  def prepare(
    number: tf.Tensor, encoded: tf.Tensor, label: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    return {
      "image": image_ops.eval_image(encoded, preprocessing),
      "label": label,
      "mask": tf.cast(number < source.size, tf.float32),
    }

  rows = batch_size // process_count
  offset = process_index * rows
  steps = -(-source.size // batch_size)
  firsts = range(offset, offset + steps * batch_size, batch_size)
  return pipeline.batches(Recipe(source, record, prepare), firsts, rows)


def _shuffled(number: tf.Tensor, size: int, seed: int) -> tf.Tensor:
  """Which record is example `number`: each epoch permutes them anew.

  Args:
    number: int64 ().
    size: of the source.
    seed: of all epochs.

  Returns:
    int64 (), from 0 to size - 1.
  """
  epoch, place = number // size, number % size
  key = tf.stack([tf.constant(seed, tf.int64), epoch, tf.zeros_like(epoch)])
  # With the default of four rounds, seed 0 hardly shuffles a small source, and
  # the epochs of one of 50,000 correlate by 0.7. Sixteen cost nothing.
  return tf.random_index_shuffle(place, key, max_index=size - 1, rounds=16)


def _check_rows(batch_size: int, index: int, count: int) -> None:
  """Refuses a batch that the processes cannot share."""
  if batch_size < 1 or batch_size % count or not 0 <= index < count:
    raise ConfigError(
      f"a batch of {batch_size} does not divide among {count} processes (this "
      f"is number {index})."
    )

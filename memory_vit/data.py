"""Batches of pictures, for training and for evaluation.

Training sees the examples number 0, 1, 2, ... without end. Everything about
number g follows from g and the seed: its epoch, which record of the source it
is, and how it is cropped. So the position in training is one number: nothing of
the input has to be saved in a checkpoint, resuming replays nothing, and the
examples of a step do not depend on how many processes share them.
"""

import atexit
import os
import re
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from memory_vit import preprocess, sources, tfds_source
from memory_vit.config import TrainDataConfig
from memory_vit.errors import ConfigError, DataError
from memory_vit.sources import Source
from memory_vit.tasks import EvalPreprocessing

Batch = dict[str, np.ndarray]

# Batches that are ready before they are asked for. A batch of 512 pictures of
# 224 px takes 0.3 GB.
_PREFETCH = 2


class _Recipe(NamedTuple):
  """How an example is made of its number, int64 ().

  Attributes:
    record: number -> index in the source, int64 ().
    prepare: number, encoded picture, label -> the example.
  """

  record: Callable[[tf.Tensor], tf.Tensor]
  prepare: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]


def open_source(
  name: str, split: str, directory: str = "", cache_gib: float = 16.0
) -> Source:
  """Opens one split of a data set; downloads it first where TFDS can.

  Args:
    name: "folder": `directory`/SPLIT/CLASS/*.jpg (or png, webp, bmp), where the
      folders in train/ are the classes. "digits": the digits that come with
      scikit-learn, "digits:0-4" a range of them. Anything else is a TFDS name,
      such as "cifar100" or "sun397/tfds".
    split: in the notation of TFDS, such as "train[:98%]" or "train+test".
    directory: the image folder; or the TFDS data directory, or the directory of
      one prepared data set (with a dataset_info.json); "" is TFDS's default.
    cache_gib: greatest size of a TFDS split without random access, which is
      read into memory (and takes twice as much while it is read).

  Raises:
    DataError: if it cannot be had, or is empty or unlabelled.
  """
  if not name:
    raise DataError("no data set is named: set config.data.name.")
  if name == "folder":
    source = sources.open_folder(split, directory)
  elif name.partition(":")[0] == "digits":
    source = sources.open_digits(name, split)
  else:
    source = tfds_source.open_tfds(name, split, directory, cache_gib)
  # A split without labels has none from the first example on; other labels are
  # checked as they come.
  try:
    _, label = source.fetch(tf.constant(0, tf.int64))
  # Outside a graph a reader's own exceptions come through.
  except Exception as error:
    raise _unreadable(source, 0, error) from error
  source.check_labels(label.numpy()[None])
  return source


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
    (b / p,)}. It raises a `DataError` that names the picture if one cannot be
    decoded, or has no label.

  Raises:
    ConfigError: if the batch does not divide, or the crop is impossible.
  """
  _check_rows(batch_size, process_index, process_count)
  if data.train_crop == "small":
    preprocess.shorter_side(data.resize, image_size)

  def record(number: tf.Tensor) -> tf.Tensor:
    return _shuffled(number, source.size, seed)

  def prepare(
    number: tf.Tensor, encoded: tf.Tensor, label: tf.Tensor
  ) -> dict[str, tf.Tensor]:
    key = tf.stack([tf.constant(seed, tf.int64), number])
    image = preprocess.train_image(
      encoded, key, data=data, image_size=image_size
    )
    return {"image": image, "label": label}

  rows = batch_size // process_count
  firsts = range(start + process_index * rows, 2**63 - batch_size, batch_size)
  return _batches(source, _Recipe(record, prepare), firsts, rows)


def train_examples(
  source: Source, *, seed: int, batch_size: int, step: int
) -> list[str]:
  """What `train_batches` puts into the batch of a step: indices, and files.

  Args:
    source: the examples.
    seed: as in `train_batches`; so is batch_size.
    batch_size: see there.
    step: from 1.
  """
  numbers = range((step - 1) * batch_size, step * batch_size)
  records = (
    int(_shuffled(tf.constant(number, tf.int64), source.size, seed))
    for number in numbers
  )
  return [f"{i} {source.file_name(i)}".strip() for i in records]


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
    (b / p,), "mask": float32 (b / p,)}. It raises a `DataError` that names the
    picture if one cannot be decoded, or has no label.

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
      "image": preprocess.eval_image(encoded, preprocessing),
      "label": label,
      "mask": tf.cast(number < source.size, tf.float32),
    }

  rows = batch_size // process_count
  offset = process_index * rows
  steps = -(-source.size // batch_size)
  firsts = range(offset, offset + steps * batch_size, batch_size)
  return _batches(source, _Recipe(record, prepare), firsts, rows)


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


# All that are not used up. A thread of TensorFlow that is in Python (some
# sources are) while the interpreter ends would never let it end.
_open_batches = weakref.WeakSet()


@atexit.register
def _close_batches() -> None:
  for batches in list(_open_batches):
    batches.close()


def _batches(
  source: Source, recipe: _Recipe, firsts: range, rows: int
) -> Iterator[Batch]:
  """Batches of the examples first, first + 1, ... of each of `firsts`."""
  batches = _generate(source, recipe, firsts, rows)
  _open_batches.add(batches)
  return batches


def _generate(
  source: Source, recipe: _Recipe, firsts: range, rows: int
) -> Iterator[Batch]:
  """See `_batches`."""

  def example(number: tf.Tensor) -> dict[str, tf.Tensor]:
    return recipe.prepare(number, *source.fetch(recipe.record(number)))

  dataset = (
    tf.data.Dataset.range(firsts.start, firsts.stop, firsts.step)
    .flat_map(lambda first: tf.data.Dataset.range(first, first + rows))
    .map(example, num_parallel_calls=os.cpu_count(), deterministic=True)
    .batch(rows, drop_remainder=True)
    .prefetch(_PREFETCH)
    .with_options(sources.without_autotuning())
  )
  batches = dataset.as_numpy_iterator()
  for first in firsts:
    try:
      batch = next(batches)
    except tf.errors.OpError as error:
      numbers = range(first, first + rows)
      raise _culprit(source, recipe.record, example, numbers, error) from error
    source.check_labels(batch["label"])
    yield batch


def _culprit(
  source: Source,
  record: Callable[[tf.Tensor], tf.Tensor],
  example: Callable[[tf.Tensor], dict[str, tf.Tensor]],
  numbers: range,
  error: tf.errors.OpError,
) -> Exception:
  """Finds the example that broke a batch, by making them one by one."""
  for number in numbers:
    one = tf.data.Dataset.from_tensors(tf.constant(number, tf.int64))
    try:
      list(one.map(example))
    except tf.errors.OpError as found:
      return _unreadable(source, int(record(one.get_single_element())), found)
  return error


def _unreadable(source: Source, index: int, error: Exception) -> DataError:
  """Names the example, and says what TensorFlow does without its node names."""
  text = error.message if isinstance(error, tf.errors.OpError) else str(error)
  line = next(iter(text.strip().splitlines()), type(error).__name__)
  reason = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", line).strip(" .")
  return DataError(f"{source.describe(index)} cannot be read: {reason}.")

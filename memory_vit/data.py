"""Batches of pictures, for training and for evaluation.

Training sees the examples number 0, 1, 2, ... without end. Everything about
number g follows from g and the seed: its epoch, which record of the source it
is, and how it is cropped. So the position in training is one number: nothing of
the input has to be saved in a checkpoint, resuming replays nothing, and the
examples of a step do not depend on how many processes share them.

That holds for unreadable examples too, where some are allowed: in training the
next readable record takes the place of one, whatever happened before; in
evaluation they do not count, and the result says how many they were.
"""

import sys
from collections.abc import Iterator

import tensorflow as tf

from memory_vit import (
  batching,
  image_ops,
  processes,
  sources,
  tfds_source,
)
from memory_vit.batching import Batch, Recipe
from memory_vit.config import TrainDataConfig
from memory_vit.errors import ConfigError, DataError
from memory_vit.inventory import Inventory
from memory_vit.sources import Source
from memory_vit.tasks import EvalPreprocessing
from memory_vit.tfds_trust import Access


def open_source(
  name: str,
  split: str,
  directory: str = "",
  cache_gib: float = 16.0,
  *,
  max_bad: int = 0,
  stall_timeout: float = 0.0,
  download: bool = True,
  trust_data_code: bool = False,
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
    max_bad: how many examples may be left out as they cannot be read.
    stall_timeout: seconds without a batch after which the process is ended, see
      `stall`; 0 is never.
    download: whether TFDS may fetch and prepare what is not there.
    trust_data_code: whether a TFDS set may name code, which is then run; see
      `tfds_trust`.

  Raises:
    DataError: if it cannot be had, or is empty or unlabelled.
    BrokenDataError: of these, where more than `max_bad` records cannot be read.
  """
  if not name:
    raise DataError("no data set is named: set config.data.name.")
  options = {"max_bad": max_bad, "stall_timeout": stall_timeout}
  if name == "folder":
    source = sources.open_folder(split, directory, **options)
  elif name.partition(":")[0] == "digits":
    source = sources.open_digits(name, split, **options)
  else:
    access = Access(download=download, trust_code=trust_data_code)
    source = tfds_source.open_tfds(
      name, split, directory, cache_gib, access, **options
    )
  _check_first_label(source)
  return source


def take_inventory(
  name: str, split: str, directory: str = "", *, trust_data_code: bool = False
) -> Inventory:
  """The inventory of a split that is there; nothing of it is read.

  Args:
    name: as in `open_source`; so are split and directory.
    split: see there.
    directory: see there.
    trust_data_code: likewise.

  Raises:
    DataError: if it is not there. It is not prepared, or downloaded.
  """
  if name == "folder":
    options = {"max_bad": sys.maxsize}
    return sources.open_folder(split, directory, **options).inventory
  if name.partition(":")[0] == "digits":
    return sources.open_digits(name, split).inventory
  access = Access(download=False, trust_code=trust_data_code)
  return tfds_source.take_inventory(name, split, directory, access)


def open_split(
  where: TrainDataConfig,
  split: str,
  stall_timeout: float,
  trust_data_code: bool = False,
) -> Source:
  """`open_source`, of a data set of a configuration; all processes must call.

  One is done before the others begin: it may be prepared on the way, in a
  directory that all share.

  Args:
    where: the data set.
    split: of it.
    stall_timeout: see `open_source`.
    trust_data_code: likewise.
  """
  return processes.first_before_others(
    lambda: open_source(
      where.name,
      split,
      where.dir,
      where.cache_gib,
      max_bad=where.max_bad,
      stall_timeout=stall_timeout,
      trust_data_code=trust_data_code,
    )
  )


def left_out(source: Source) -> list[int]:
  """Examples that could not be read so far; all processes must call.

  Each process meets those of its own share; from here on all know all.

  Raises:
    BrokenDataError: where they are more than may be left out.
  """
  if not source.max_bad:
    return []
  numbers = processes.known_to_any(source.left_out)
  source.leave_out(dict.fromkeys(numbers, "another process could not read it"))
  return numbers


def _check_first_label(source: Source) -> None:
  """Refuses a split without labels, which has none from the beginning on.

  Other labels are checked as they come.
  """
  for index in range(source.size):
    if index in source.left_out:
      continue
    try:
      _, label = source.fetch(tf.constant(index, tf.int64))
    # Outside a graph a reader's own exceptions come through.
    except Exception as error:
      source.leave_out({index: sources.reason_of(error)})
    else:
      source.check_labels(label.numpy()[None], lambda _, index=index: index)
      return
  raise batching.nothing_readable(source)


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
  return batching.batches(Recipe(source, record, prepare), firsts, rows)


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
  return batching.batches(Recipe(source, record, prepare), firsts, rows)


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

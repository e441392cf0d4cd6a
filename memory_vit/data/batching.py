"""Batches for training and evaluation, by example number.

Training sees the examples number 0, 1, 2, ... without end. The epoch of example
g, its record and its crop follow from g and the seed. So the position in
training is one number: a checkpoint saves no state of the input, resuming
replays nothing, and the examples of a step do not depend on the number of
processes.

Unreadable examples, if some are allowed, do not change this: training replaces
each by the next readable record; evaluation does not count them, and the result
states their number.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from memory_vit.config import DataConfig
from memory_vit.data import pipeline, random_decisions
from memory_vit.data.pipeline import Batch, ExampleFn
from memory_vit.data.preparations import EvalImage, TrainCrop
from memory_vit.data.source import ExampleError
from memory_vit.data.split import Split
from memory_vit.errors import BrokenDataError, ConfigError
from memory_vit.model.task import EvalPreprocessing


def train_batches(
  split: Split,
  data: DataConfig,
  *,
  image_size: int,
  batch_size: int,
  seed: int,
  start: int = 0,
  process_index: int | None = None,
  process_count: int | None = None,
  interpolation: str = "bilinear",
) -> Iterator[Batch]:
  """Return an endless iterator over batches for training.

  Each epoch is a permutation of the split. Epochs follow each other without a
  gap: a batch may hold the end of one and the start of the next, and a split
  may be smaller than a batch.

  Args:
    split: the examples.
    data: how images are cropped and mirrored.
    image_size: side of the square, in pixels.
    batch_size: b, the global batch size, over all processes.
    seed: random seed of the order and of the crops.
    start: number of the first example; k * batch_size resumes training exactly
      after k steps.
    process_index: i, the index of the process, which gets b / p rows of each
      batch, starting at row i * b / p; by default this process.
    process_count: p, the number of processes; by default all of this run.
    interpolation: method of evaluation, which `train_crop` "resize" also uses.

  Returns:
    Iterator over {"image": float32 (b / p, side, side, 3) in [-1, 1], "label":
    int32 (b / p,) of classes, float32 (b / p, c) of labels, or float64 of
    values}. Unreadable examples, at most `max_bad`, are replaced by the next
    readable examples. If there are more, or if an example has no label, the
    iterator raises a `BrokenDataError` that names these examples.

  Raises:
    ConfigError: if p does not divide b, or the crop is impossible.
  """
  rows, first = share(batch_size, process_index, process_count)
  starts = range(start + first, 2**63 - batch_size, batch_size)
  example = ExampleFn(
    split=split,
    records=lambda numbers: random_decisions.shuffled(
      numbers, split.size, seed
    ),
    prepare=TrainCrop(data, image_size, interpolation),
    uniforms=functools.partial(random_decisions.uniforms, seed),
  )
  return pipeline.batches(example, starts, rows)


def train_examples(
  split: Split, *, seed: int, batch_size: int, step: int
) -> list[str]:
  """Name the examples in the batch of a step by index and file.

  Known unreadable examples are replaced, as in training.

  Args:
    split: the examples.
    seed: as in `train_batches`.
    batch_size: as in `train_batches`.
    step: number of the step, from 1.
  """
  numbers = np.arange((step - 1) * batch_size, step * batch_size)
  return names_of(split, random_decisions.shuffled(numbers, split.size, seed))


def names_of(split: Split, records: Iterable[int]) -> list[str]:
  """Name records, or the readable records that replace unreadable ones."""
  names = []
  for record in records:
    index = int(record)
    while index in split.unreadable:
      index = (index + 1) % split.size
    names.append(f"{index} {split.file_name(index)}".strip())
  return names


def eval_batches(
  split: Split,
  preprocessing: EvalPreprocessing,
  *,
  batch_size: int,
  process_index: int | None = None,
  process_count: int | None = None,
) -> Iterator[Batch]:
  """Return an iterator over batches with every example once, in order.

  The last batch is filled up by repeating the last example, with mask 0. All
  processes get the same number of batches.

  Args:
    split: the examples.
    preprocessing: how images are prepared; side is its `image_size`.
    batch_size: b, the global batch size, over all processes.
    process_index: as in `train_batches`.
    process_count: p, as in `train_batches`.

  Returns:
    As `train_batches`, and "mask": float32 (b / p,). Unreadable examples, at
    most `max_bad`, have mask 0.

  Raises:
    ConfigError: if p does not divide b.
  """
  rows, first = share(batch_size, process_index, process_count)

  steps = -(-split.size // batch_size)
  starts = range(first, first + steps * batch_size, batch_size)
  example = ExampleFn(
    split=split,
    records=lambda numbers: np.minimum(numbers, split.size - 1),
    prepare=EvalImage(preprocessing),
    counts=lambda numbers: (numbers < split.size).astype(np.float32),
  )
  return pipeline.batches(example, starts, rows)


def eval_images(
  split: Split, preprocessing: EvalPreprocessing, indices: Sequence[int]
) -> np.ndarray:
  """Return float32 (k, side, side, 3), bitwise identical to `eval_batches`."""
  split.require_images()
  side = preprocessing.image_size
  images = np.zeros((len(indices), side, side, 3), np.float32)
  if not len(indices):
    return images
  with split.time_limit(int(indices[0])):
    rows = split.source.examples(EvalImage(preprocessing), indices)
    for place, (index, example) in enumerate(zip(indices, rows, strict=True)):
      if isinstance(example, ExampleError):
        raise BrokenDataError(
          f"{split.describe(int(index))} cannot be read: {example}."
        )
      images[place], _ = example
  return images


def share(
  batch_size: int, index: int | None = None, count: int | None = None
) -> tuple[int, int]:
  """Return (number of a process's rows in a batch, index of its first row)."""
  index = jax.process_index() if index is None else index
  count = jax.process_count() if count is None else count
  if batch_size < 1 or batch_size % count or not 0 <= index < count:
    raise ConfigError(
      f"a batch of {batch_size} does not divide among {count} processes (this "
      f"is process {index})."
    )
  rows = batch_size // count
  return rows, index * rows

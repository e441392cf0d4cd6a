"""Examples by number, put into batches; those that cannot be read left out."""

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from memory_vit.data import sources, watchdog
from memory_vit.data.sources import Source
from memory_vit.errors import BrokenDataError

logger = logging.getLogger("memory_vit")

Batch = dict[str, np.ndarray]

# Batches that are ready before they are asked for. A batch of 512 pictures of
# 224 px takes 0.3 GB.
_PREFETCH = 2


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How an example is made of its number, int64 ().

  Attributes:
    source: of the records.
    record: number -> index in the source, int64 ().
    prepare: number, encoded picture, label -> the example.
  """

  source: Source
  record: Callable[[tf.Tensor], tf.Tensor]
  prepare: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]

  @functools.cached_property
  def example(self) -> Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]:
    """Number, how far behind its own record -> the example; both int64 ().

    Traced once: a batch with a broken picture makes two more pipelines.
    """

    def made(number: tf.Tensor, behind: tf.Tensor) -> dict[str, tf.Tensor]:
      index = (self.record(number) + behind) % self.source.size
      return self.prepare(number, *self.source.fetch(index))

    signature = [tf.TensorSpec((), tf.int64)] * 2
    return tf.function(made, input_signature=signature, autograph=False)

  def index(self, number: int, behind: int) -> int:
    """Which record `example` takes."""
    record = self.record(tf.constant(number, tf.int64))
    return (int(record) + int(behind)) % self.source.size

  def check_labels(
    self, labels: np.ndarray, numbers: range, behind: np.ndarray
  ) -> None:
    """Refuses labels (b,) that are not classes: see `Source.check_labels`."""
    self.source.check_labels(
      labels, lambda place: self.index(numbers[place], behind[place])
    )

  def limit(self, numbers: range) -> contextlib.AbstractContextManager:
    """For how long to wait for the batch of `numbers`."""
    name, split = self.source.name, self.source.split
    what = f"data set {name!r}, split {split!r}, from example {numbers[0]} on"
    return watchdog.limit(self.source.stall_timeout, what)


# All that are not used up. A thread of TensorFlow that is in Python (some
# sources are) while the interpreter ends would never let it end.
_open_batches = weakref.WeakSet()


@atexit.register
def _close_batches() -> None:
  for batches in list(_open_batches):
    batches.close()


def batches(recipe: Recipe, firsts: range, rows: int) -> Iterator[Batch]:
  """Batches of the examples first, first + 1, ... of each of `firsts`.

  Args:
    recipe: of the examples.
    firsts: number of the first example of each batch.
    rows: of a batch.

  Returns:
    Iterator over what `recipe.prepare` makes, stacked. It raises a
    `BrokenDataError` where more examples cannot be read than may, or a label is
    no class.
  """
  generated = _generate(recipe, firsts, rows)
  _open_batches.add(generated)
  return generated


def _generate(recipe: Recipe, firsts: range, rows: int) -> Iterator[Batch]:
  """See `batches`."""
  made, numbers = None, range(firsts[0], firsts[0] + rows)
  try:
    while firsts:
      numbers = range(firsts[0], firsts[0] + rows)
      with recipe.limit(numbers):
        made = made or _pipeline(recipe, firsts, rows)
        try:
          batch, behind = next(made), np.zeros(rows, np.int64)
        except tf.errors.OpError as error:
          # It has lost the rows of a batch, and is not used any more.
          made = None
          batch, behind = _read_singly(recipe, numbers, error)
      recipe.check_labels(batch["label"], numbers, behind)
      yield batch
      firsts = firsts[1:]
  finally:
    # To let go of a pipeline is to wait for what its threads are reading.
    with recipe.limit(numbers):
      made = None


def _pipeline(recipe: Recipe, firsts: range, rows: int) -> Iterator[Batch]:
  """The batches as long as all examples can be read."""
  dataset = (
    tf.data.Dataset.range(firsts.start, firsts.stop, firsts.step)
    .flat_map(lambda first: tf.data.Dataset.range(first, first + rows))
    .map(
      lambda number: recipe.example(number, tf.zeros_like(number)),
      num_parallel_calls=os.cpu_count(),
      deterministic=True,
    )
    .batch(rows, drop_remainder=True)
    .prefetch(_PREFETCH)
    .with_options(sources.without_autotuning())
  )
  return dataset.as_numpy_iterator()


def _read_singly(
  recipe: Recipe, numbers: range, error: tf.errors.OpError
) -> tuple[Batch, np.ndarray]:
  """A batch in which an example could not be made, each example by itself.

  Where one cannot be made of its record, the next record of the source is
  tried, and so on: what comes out depends on the number of the example alone.

  Args:
    recipe: of the examples.
    numbers: of the examples.
    error: that ended the batch.

  Returns:
    The batch, and how far behind its own record that of each example lies.

  Raises:
    BrokenDataError: where more examples cannot be read than may.
  """
  source = recipe.source
  examples: dict[int, dict[str, np.ndarray]] = {}
  behind = np.zeros(len(numbers), np.int64)
  while missing := [i for i in range(len(numbers)) if i not in examples]:
    wanted = (np.array(numbers)[missing], behind[missing])
    dataset = (
      tf.data.Dataset.from_tensor_slices(wanted)
      .map(
        recipe.example, num_parallel_calls=os.cpu_count(), deterministic=True
      )
      .with_options(sources.without_autotuning())
    )
    bad = {}
    for i, made in zip(
      missing, sources.attempts(dataset, len(missing)), strict=True
    ):
      if isinstance(made, tf.errors.OpError):
        bad[recipe.index(numbers[i], behind[i])] = sources.reason_of(made)
        behind[i] += 1
      else:
        examples[i] = made
    source.leave_out(bad)
    if max(behind) >= source.size:
      raise nothing_readable(source)
  if not behind.any():
    # For example a file system that was away for a moment.
    logger.warning(
      "data set %r, split %r, examples %d to %d: read at the second attempt; "
      "at the first: %s", source.name, source.split, numbers[0], numbers[-1],
      sources.reason_of(error),
    )  # fmt: skip
  batch = {
    key: np.stack([examples[i][key] for i in range(len(numbers))])
    for key in examples[0]
  }
  if "mask" in batch:  # each counts once: none in place of another
    batch["mask"] = np.where(behind, np.float32(0), batch["mask"])
  return batch, behind


def nothing_readable(source: Source) -> BrokenDataError:
  """What to raise where no example at all can be read."""
  return BrokenDataError(
    f"data set {source.name!r}, split {source.split!r}: none of its "
    f"{source.size} examples can be read."
  )

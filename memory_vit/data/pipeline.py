"""Make examples from their numbers, and batches of them, in tf.data."""

import atexit
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Generator, Iterator

import numpy as np

from memory_vit.data import parallel
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.split import Split

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]

# Batches that are ready before they are asked for. A batch of 512 images of
# 224 px takes 0.3 GB.
_PREFETCH = 2


@dataclasses.dataclass(frozen=True)
class ExampleFn:
  """A function from the number of an example, int64 (), to the example.

  The offset of an example is the number of unreadable records that it skips.

  Attributes:
    split: the records.
    record: number -> index in the split, int64 ().
    prepare: number, encoded image, label -> the example.
  """

  split: Split
  record: Callable[[tf.Tensor], tf.Tensor]
  prepare: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]

  def __post_init__(self) -> None:
    self.split.require_images()

  @functools.cached_property
  def graph(self) -> Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]:
    """Number and offset, int64 () -> the example.

    Traced once: a batch with a broken image makes two more pipelines.
    """
    split = self.split

    def make(number: tf.Tensor, offset: tf.Tensor) -> dict[str, tf.Tensor]:
      index = (self.record(number) + offset) % split.size
      return self.prepare(number, *split.fetch(index))

    signature = [tf.TensorSpec((), tf.int64)] * 2
    return tf.function(make, input_signature=signature, autograph=False)

  def index(self, number: int, offset: int) -> int:
    """The index of the record that an example takes."""
    record = self.record(tf.constant(number, tf.int64))
    return (int(record) + int(offset)) % self.split.size

  def check_labels(
    self, labels: np.ndarray, numbers: range, offsets: np.ndarray
  ) -> None:
    self.split.check_labels(
      labels, lambda row: self.index(numbers[row], offsets[row])
    )


# All that are not used up. A thread of TensorFlow that runs Python while the
# interpreter ends would never let it end.
_open_batches: weakref.WeakSet[Generator[Batch]] = weakref.WeakSet()


@atexit.register
def close_batches() -> None:
  for batches in list(_open_batches):
    batches.close()


def batches(example: ExampleFn, starts: range, rows: int) -> Iterator[Batch]:
  """Batches of the `rows` examples from each of `starts` on."""
  generated = _generate(example, starts, rows)
  _open_batches.add(generated)
  return generated


def _generate(example: ExampleFn, starts: range, rows: int) -> Generator[Batch]:
  """Yield the batches; begin a new pipeline behind one that failed."""
  pipeline, split = None, example.split
  start = starts[0]
  try:
    while starts:
      start = starts[0]
      numbers = range(start, start + rows)
      with split.time_limit(start):
        pipeline = pipeline or _pipeline(example, starts, rows)
        try:
          batch, offsets = next(pipeline)
        except tf.errors.OpError as error:
          # It has lost the rows of a batch, and is not used any more.
          pipeline = None
          batch, offsets = _read_singly(example, numbers, error)
      example.check_labels(batch["label"], numbers, offsets)
      if "mask" in batch:  # one in place of another does not count
        batch["mask"] = np.where(offsets, np.float32(0), batch["mask"])
      yield batch
      starts = starts[1:]
  finally:
    # To let go of a pipeline is to wait for what its threads are reading.
    with split.time_limit(start):
      pipeline = None


def _pipeline(
  example: ExampleFn, starts: range, rows: int
) -> Iterator[tuple[Batch, np.ndarray]]:
  """Batches and offsets until an example that is not known cannot be read."""
  skips = example.split.skips
  known = tf.constant([*skips], tf.int64)
  steps = tf.constant([*skips.values()], tf.int64)

  def make(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    is_known = known == example.record(number) % example.split.size
    offset = tf.reduce_sum(tf.where(is_known, steps, 0))
    return example.graph(number, offset), offset

  first = tf.data.Dataset.range(starts.start, starts.stop, starts.step)
  numbers = first.flat_map(lambda n: tf.data.Dataset.range(n, n + rows))
  examples = parallel.parallel_map(numbers, make)
  stacked = examples.batch(rows, drop_remainder=True).prefetch(_PREFETCH)
  return stacked.as_numpy_iterator()


def _read_singly(
  example: ExampleFn, numbers: range, error: tf.errors.OpError
) -> tuple[Batch, np.ndarray]:
  """Read a batch that ended with an error, each example by itself.

  If one cannot be made of its record, the next record of the split is tried,
  and so on: the result depends on the number of the example alone.
  """
  split, skips = example.split, example.split.skips
  made: dict[int, dict[str, np.ndarray]] = {}
  offsets = np.array([skips.get(example.index(n, 0), 0) for n in numbers])
  while missing := [i for i in range(len(numbers)) if i not in made]:
    wanted = (np.array(numbers)[missing], offsets[missing])
    dataset = tf.data.Dataset.from_tensor_slices(wanted)
    attempts = parallel.attempts(dataset, example.graph)
    bad = {}
    for i, result in zip(missing, attempts, strict=True):
      if isinstance(result, tf.errors.OpError):
        bad[example.index(numbers[i], offsets[i])] = parallel.reason_of(result)
        offsets[i] += 1
      else:
        made[i] = result
    split.mark_unreadable(bad)
    if max(offsets) >= split.size:
      raise split.nothing_readable()
  if skips == split.skips:
    # For example a file system that was away for a moment.
    logger.warning(
      "%s, examples %d to %d: read at the second attempt; at the first: %s",
      split, numbers[0], numbers[-1], parallel.reason_of(error),
    )  # fmt: skip
  return {
    key: np.stack([made[i][key] for i in range(len(numbers))])
    for key in made[0]
  }, offsets

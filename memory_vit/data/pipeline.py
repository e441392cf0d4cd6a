"""Make examples from their numbers, and batches of them, in tf.data."""

import atexit
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping

import numpy as np

from memory_vit.data import parallel, random_decisions
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.split import Split

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]

# Batches that are ready before they are asked for. A batch of 512 images of
# 224 px takes 0.3 GB.
_PREFETCH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleFn:
  """A function from the number of an example to the example.

  The offset of an example is the number of unreadable records that it skips.

  Attributes:
    split: the records.
    records: numbers, int64 (b,) -> indices in the split, int64 (b,).
    uniforms: numbers, int64 (b,) -> float64 (b, k), for random decisions.
    prepare: encoded image, string (), and its uniforms, float64 (k,) -> image.
    counts: numbers, int64 (b,) -> "mask", float32 (b,), in evaluation.
  """

  split: Split
  records: Callable[[np.ndarray], np.ndarray]
  prepare: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
  uniforms: Callable[[np.ndarray], np.ndarray] = random_decisions.undecided
  counts: Callable[[np.ndarray], np.ndarray] | None = None

  def __post_init__(self) -> None:
    self.split.require_images()

  @functools.cached_property
  def graph(self) -> Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]:
    """Index, int64 (), and uniforms, float64 (k,) -> the example.

    Traced once: a batch with a broken image makes two more pipelines.
    """

    def make(index: tf.Tensor, uniforms: tf.Tensor) -> dict[str, tf.Tensor]:
      encoded, label = self.split.fetch(index)
      return {"image": self.prepare(encoded, uniforms), "label": label}

    signature = [
      tf.TensorSpec((), tf.int64), tf.TensorSpec((None,), tf.float64)
    ]  # fmt: skip
    return tf.function(make, input_signature=signature, autograph=False)

  def indices(self, numbers: range, offsets: np.ndarray) -> np.ndarray:
    """Indices, int64 (b,), of the records that examples take."""
    return (self.records(np.array(numbers)) + offsets) % self.split.size

  def offsets(self, numbers: range, skips: Mapping[int, int]) -> np.ndarray:
    """Offsets, int64 (b,), of examples whose records are known to be broken."""
    records = self.records(np.array(numbers))
    return np.array([skips.get(index, 0) for index in records.tolist()])


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
      indices = example.indices(numbers, offsets)
      split.check_labels(batch["label"], indices.__getitem__)
      if example.counts:  # one in place of another does not count
        counts = example.counts(np.array(numbers))
        batch["mask"] = np.where(offsets, np.float32(0), counts)
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

  def decide(start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = range(int(start), int(start) + rows)
    offsets = example.offsets(numbers, skips)
    uniforms = example.uniforms(np.array(numbers))
    return example.indices(numbers, offsets), uniforms, offsets

  def decided(start: tf.Tensor) -> tuple[tf.Tensor, ...]:
    kinds = (tf.int64, tf.float64, tf.int64)
    indices, uniforms, offsets = tf.numpy_function(decide, [start], kinds)
    return (
      tf.ensure_shape(indices, (rows,)),
      tf.ensure_shape(uniforms, (rows, None)),
      tf.ensure_shape(offsets, (rows,)),
    )

  def make(
    index: tf.Tensor, uniforms: tf.Tensor, offset: tf.Tensor
  ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    return example.graph(index, uniforms), offset

  first = tf.data.Dataset.range(starts.start, starts.stop, starts.step)
  examples = parallel.parallel_map(first.map(decided).unbatch(), make)
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
  offsets = example.offsets(numbers, skips)
  uniforms = example.uniforms(np.array(numbers))
  while missing := [i for i in range(len(numbers)) if i not in made]:
    indices = example.indices(numbers, offsets)
    wanted = (indices[missing], uniforms[missing])
    dataset = tf.data.Dataset.from_tensor_slices(wanted)
    attempts = parallel.attempts(dataset, example.graph)
    bad = {}
    for i, result in zip(missing, attempts, strict=True):
      if isinstance(result, tf.errors.OpError):
        bad[int(indices[i])] = parallel.reason_of(result)
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

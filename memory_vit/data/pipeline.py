"""Batches of examples by their numbers, of any source."""

import atexit
import dataclasses
import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping

import numpy as np

from memory_vit.data import random_decisions
from memory_vit.data.source import (
  BatchRows,
  ExampleError,
  Inputs,
  Preparation,
)
from memory_vit.data.split import Split

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleFn:
  """A function from the number of an example to the example.

  The offset of an example is the number of unreadable records that it skips.

  Attributes:
    split: the records.
    prepare: their images.
    records: numbers, int64 (b,) -> indices in the split, int64 (b,).
    uniforms: numbers, int64 (b,) -> float64 (b, k), for random decisions.
    counts: numbers, int64 (b,) -> "mask", float32 (b,), in evaluation.
  """

  split: Split
  prepare: Preparation
  records: Callable[[np.ndarray], np.ndarray]
  uniforms: Callable[[np.ndarray], np.ndarray] = random_decisions.undecided
  counts: Callable[[np.ndarray], np.ndarray] | None = None

  def __post_init__(self) -> None:
    self.split.require_images()

  def inputs(self, numbers: range, skips: Mapping[int, int]) -> Inputs:
    """The inputs of examples, of which those with known records skip some."""
    examples = np.array(numbers)
    records = self.records(examples)
    offsets = np.array([skips.get(index, 0) for index in records.tolist()])
    indices = (records + offsets) % self.split.size
    return Inputs(indices, self.uniforms(examples), offsets)


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
  pipeline: Generator[BatchRows] | None = None
  split, start = example.split, starts[0]
  try:
    while starts:
      start = starts[0]
      numbers = range(start, start + rows)
      with split.time_limit(start):
        pipeline = pipeline or _pipeline(example, starts, rows)
        try:
          images, labels, offsets = next(pipeline)
        except ExampleError as error:
          # It has lost the rows of a batch, and is not used any more.
          pipeline = None
          images, labels, offsets = _read_singly(example, numbers, error)
      indices = (example.records(np.array(numbers)) + offsets) % split.size
      split.check_labels(labels, indices.__getitem__)
      batch = {"image": images, "label": labels}
      if example.counts:  # one in place of another does not count
        counts = example.counts(np.array(numbers))
        batch["mask"] = np.where(offsets, np.float32(0), counts)
      yield batch
      starts = starts[1:]
  finally:
    # To close a pipeline is to wait for what its threads are reading.
    with split.time_limit(start):
      if pipeline:
        pipeline.close()


def _pipeline(
  example: ExampleFn, starts: range, rows: int
) -> Generator[BatchRows]:
  """Batches until an example that is not known cannot be read."""
  split, skips = example.split, example.split.skips

  def inputs(start: int) -> Inputs:
    return example.inputs(range(start, start + rows), skips)

  return split.source.batches(example.prepare, inputs, starts)


def _read_singly(
  example: ExampleFn, numbers: range, error: ExampleError
) -> BatchRows:
  """Read a batch that ended with an error, each example by itself.

  If one cannot be made of its record, the next record of the split is tried,
  and so on: the result depends on the number of the example alone.
  """
  split, skips = example.split, example.split.skips
  made: dict[int, tuple[np.ndarray, np.ndarray]] = {}
  _, uniforms, offsets = example.inputs(numbers, skips)
  records = example.records(np.array(numbers))
  while missing := [i for i in range(len(numbers)) if i not in made]:
    indices = (records + offsets) % split.size
    attempts = split.source.examples(
      example.prepare, indices[missing], uniforms[missing]
    )
    bad = {}
    for i, result in zip(missing, attempts, strict=True):
      if isinstance(result, ExampleError):
        bad[int(indices[i])] = str(result)
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
      split, numbers[0], numbers[-1], error,
    )  # fmt: skip
  images, labels = zip(*(made[i] for i in range(len(numbers))), strict=True)
  return np.stack(images), np.stack(labels), offsets

"""Make batches of examples, which are given by number, from any source."""

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
  """Function from the number of an example to the example, a prepared record.

  The offset of an example counts the unreadable records that were skipped.

  Attributes:
    split: split that holds the records.
    prepare: preparation of the images.
    records: function: numbers, int64 (b,) -> indices in the split, int64 (b,).
    uniforms: function: numbers, int64 (b,) -> random numbers, float64 (b, k).
    counts: function: numbers, int64 (b,) -> mask, float32 (b,); None in
      training, whose batches have no "mask".
  """

  split: Split
  prepare: Preparation
  records: Callable[[np.ndarray], np.ndarray]
  uniforms: Callable[[np.ndarray], np.ndarray] = random_decisions.undecided
  counts: Callable[[np.ndarray], np.ndarray] | None = None

  def __post_init__(self) -> None:
    self.split.require_images()

  def inputs(self, numbers: range, skips: Mapping[int, int]) -> Inputs:
    """Return inputs of examples; `skips` (`Split.skips`) skips bad records."""
    examples = np.array(numbers)
    records = self.records(examples)
    offsets = np.array([skips.get(index, 0) for index in records.tolist()])
    indices = (records + offsets) % self.split.size
    return Inputs(indices, self.uniforms(examples), offsets)


# Generators that are not closed yet. `close_batches` closes them at exit: a
# TensorFlow thread that still runs Python would keep Python from exiting.
_open_batches: weakref.WeakSet[Generator[Batch]] = weakref.WeakSet()


@atexit.register
def close_batches() -> None:
  for batches in list(_open_batches):
    batches.close()


def batches(example: ExampleFn, starts: range, rows: int) -> Iterator[Batch]:
  """Return batches of `rows` examples that begin at the numbers `starts`."""
  generated = _generate(example, starts, rows)
  _open_batches.add(generated)
  return generated


def _generate(example: ExampleFn, starts: range, rows: int) -> Generator[Batch]:
  """Yield the batches; if a pipeline fails, continue with a new pipeline."""
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
          # Drop the pipeline, because it has lost the rows of this batch.
          pipeline = None
          images, labels, offsets = _read_singly(example, numbers, error)
      indices = (example.records(np.array(numbers)) + offsets) % split.size
      split.check_labels(labels, indices.__getitem__)
      batch = {"image": images, "label": labels}
      if example.counts:
        counts = example.counts(np.array(numbers))
        # Mask out records that replace unreadable records.
        batch["mask"] = np.where(offsets, np.float32(0), counts)
      yield batch
      starts = starts[1:]
  finally:
    # Limit the time: closing waits for threads, which may hang reading files.
    with split.time_limit(start):
      if pipeline:
        pipeline.close()


def _pipeline(
  example: ExampleFn, starts: range, rows: int
) -> Generator[BatchRows]:
  """Yield batches; raise `ExampleError` if an example cannot be read.

  Examples that are known to be unreadable, see `Split.skips`, are skipped.
  """
  split, skips = example.split, example.split.skips

  def inputs(start: int) -> Inputs:
    return example.inputs(range(start, start + rows), skips)

  return split.source.batches(example.prepare, inputs, starts)


def _read_singly(
  example: ExampleFn, numbers: range, error: ExampleError
) -> BatchRows:
  """Return the rows of a batch for which a pipeline raised `error`.

  Each example is read separately. The next readable record of the split
  replaces an unreadable record. Therefore, the rows do not depend on when the
  record was found to be unreadable: by this call, or earlier.
  """
  split, skips = example.split, example.split.skips
  examples: dict[int, tuple[np.ndarray, np.ndarray]] = {}
  _, uniforms, offsets = example.inputs(numbers, skips)
  records = example.records(np.array(numbers))
  while missing := [i for i in range(len(numbers)) if i not in examples]:
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
        examples[i] = result
    split.mark_unreadable(bad)
    if max(offsets) >= split.size:
      raise split.nothing_readable()
  if skips == split.skips:
    # No record is broken: perhaps a file system was unavailable for a moment.
    logger.warning(
      "%s, examples %d to %d: read at the second attempt; at the first: %s",
      split, numbers[0], numbers[-1], error,
    )  # fmt: skip
  images, labels = zip(*(examples[i] for i in range(len(numbers))), strict=True)
  return np.stack(images), np.stack(labels), offsets

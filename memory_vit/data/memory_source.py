"""Source of examples in memory, prepared by threads without TensorFlow."""

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from memory_vit.data import random_decisions
from memory_vit.data.source import (
  PREFETCH,
  BatchRows,
  Example,
  ExampleError,
  Inputs,
  Preparation,
)
from memory_vit.errors import DataError

_THREADS = os.cpu_count() or 1
# Number of examples that a thread prepares at a time: passing a single example
# to a thread takes as long as preparing a small image.
_PART = 8
K = TypeVar("K")
V = TypeVar("V")


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class MemorySource:
  """Source of encoded images, and of labels, (n,) or (n, c), in memory."""

  images: Sequence[bytes]
  numbers: np.ndarray

  def read(self, index: int) -> tuple[bytes, np.ndarray]:
    return self.images[index], self.numbers[index]

  def labels(
    self, indices: Sequence[int] | np.ndarray
  ) -> Iterator[np.ndarray | ExampleError]:
    return iter(self.numbers[np.array(indices, np.int64)])

  def examples(
    self,
    prepare: Preparation,
    indices: Sequence[int] | np.ndarray,
    uniforms: np.ndarray | None = None,
  ) -> Iterator[Example | ExampleError]:
    if uniforms is None:
      uniforms = random_decisions.undecided(np.asarray(indices))

    def attempt(wanted: tuple[int, np.ndarray]) -> Example | ExampleError:
      try:
        return self._example(prepare, *wanted)
      except ExampleError as error:
        return error

    wanted = zip(map(int, indices), uniforms, strict=True)
    return _in_order(attempt, wanted, ahead=2 * _THREADS)

  def batches(
    self, prepare: Preparation, inputs: Callable[[int], Inputs], starts: range
  ) -> Generator[BatchRows]:
    def make(inputs: Inputs) -> list[Example]:
      pairs = zip(inputs.indices.tolist(), inputs.uniforms, strict=True)
      return [self._example(prepare, *pair) for pair in pairs]

    offsets = collections.deque[np.ndarray]()

    def parts() -> Iterator[Inputs]:
      for start in starts:
        batch = inputs(start)
        offsets.append(batch.offsets)
        for i in range(0, len(batch.indices), _PART):
          yield Inputs(*(column[i : i + _PART] for column in batch))

    count = -(-len(inputs(starts[0]).indices) // _PART)
    prepared = _in_order(make, parts(), ahead=PREFETCH * count)
    try:
      while examples := [*itertools.chain(*itertools.islice(prepared, count))]:
        images, labels = zip(*examples, strict=True)
        yield np.stack(images), np.stack(labels), offsets.popleft()
    finally:
      prepared.close()

  def take(self, indices: np.ndarray) -> "MemorySource":
    images = [self.images[index] for index in indices.tolist()]
    return MemorySource(images, self.numbers[indices])

  def renumbered(self, numbers: np.ndarray) -> "MemorySource":
    return MemorySource(self.images, numbers[self.numbers])

  def decoded(
    self, images: Sequence[bytes], labels: np.ndarray
  ) -> "MemorySource":
    return MemorySource(images, labels)

  def _example(
    self, prepare: Preparation, index: int, uniforms: np.ndarray
  ) -> Example:
    try:
      image = prepare.in_numpy(self.images[index], uniforms)
    except DataError as error:
      raise ExampleError(str(error)) from error
    return image, self.numbers[index]


def _in_order(
  function: Callable[[K], V], items: Iterable[K], ahead: int
) -> Generator[V]:
  """Yield function(item) in order; threads compute `ahead` items in advance."""
  waiting = collections.deque[Future[Any]]()
  with ThreadPoolExecutor(_THREADS, "memory_vit-examples") as threads:
    try:
      for item in items:
        waiting.append(threads.submit(function, item))
        if len(waiting) > ahead:
          yield waiting.popleft().result()
      while waiting:
        yield waiting.popleft().result()
    finally:  # after an early exit, nobody needs the remaining results
      for future in waiting:
        future.cancel()

"""Interface of data sources, which read the examples of a split by index.

Images in memory are prepared by threads in NumPy (`memory_source`), images of
files and of TFDS by tf.data (`graph_source`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
  import tensorflow as tf

# Number of batches that are prepared in advance. A batch of 512 images with 224
# pixels a side takes 0.3 GB.
PREFETCH = 2


class ExampleError(Exception):
  """Error of an unreadable example; its message is the reason, in one line."""


class Inputs(NamedTuple):
  """Indices of the examples of a batch, and random numbers for their crops.

  Attributes:
    indices: indices of the examples, int64 (b,).
    uniforms: random numbers, float64 (b, k), see `random_decisions`.
    offsets: number of unreadable records skipped for each row, int64 (b,).
  """

  indices: np.ndarray
  uniforms: np.ndarray
  offsets: np.ndarray


class Preparation(Protocol):
  """Image preparation, bitwise identical in TensorFlow and in NumPy."""

  def in_graph(self, encoded: tf.Tensor, uniforms: tf.Tensor) -> Any:
    """Prepare an encoded image, string (), with `uniforms`, float64 (k,)."""

  def in_numpy(self, encoded: bytes, uniforms: np.ndarray) -> Any:
    """Prepare an encoded image, or raise `DataError`."""


# (result of a `Preparation`, label of the example).
Example = tuple[Any, np.ndarray]
# (images, labels, offsets) of a batch, each (b, ...); for offsets see `Inputs`.
BatchRows = tuple[np.ndarray, np.ndarray, np.ndarray]


class Source(Protocol):
  """Examples of a split: encoded images, each with its label.

  A label is int32 () for tasks of "classes", float32 (c,) for "labels", and
  float64 (c,) for "values".
  """

  def read(self, index: int) -> tuple[bytes, np.ndarray]:
    """Read one example, or raise `ExampleError`."""

  def labels(
    self, indices: Sequence[int] | np.ndarray
  ) -> Iterator[np.ndarray | ExampleError]:
    """Yield labels in order; no image is decoded."""

  def examples(
    self,
    prepare: Preparation,
    indices: Sequence[int] | np.ndarray,
    uniforms: np.ndarray | None = None,
  ) -> Iterator[Example | ExampleError]:
    """Yield prepared examples in order."""

  def batches(
    self, prepare: Preparation, inputs: Callable[[int], Inputs], starts: range
  ) -> Generator[BatchRows]:
    """Yield the batch of each start; raise the first `ExampleError`."""

  def take(self, indices: np.ndarray) -> Source:
    """Return a source of the examples at `indices`."""

  def renumbered(self, numbers: np.ndarray) -> Source:
    """Return a source whose class i becomes class `numbers[i]`, int32 (c,)."""

  def decoded(self, images: Sequence[bytes], labels: np.ndarray) -> Source:
    """Return a source of decoded images, as strings of `raw_images`."""

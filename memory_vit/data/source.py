"""Read the examples of a split by index: the interface of sources of data.

Images that are in memory are prepared by threads in NumPy (`memory_source`),
those of files by tf.data (`graph_source`). The kind of data set decides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
  import tensorflow as tf

# Batches that are ready before they are asked for. A batch of 512 images of
# 224 px takes 0.3 GB.
PREFETCH = 2


class ExampleError(Exception):
  """Why an example cannot be read, in one line."""


class Inputs(NamedTuple):
  """Indices of the examples of a batch, and random numbers of their crops.

  Attributes:
    indices: of the examples, int64 (b,).
    uniforms: float64 (b, k), see `random_decisions`.
    offsets: number of unreadable examples that each row skips, int64 (b,).
  """

  indices: np.ndarray
  uniforms: np.ndarray
  offsets: np.ndarray


class Preparation(Protocol):
  """Image preparation, in TensorFlow and in NumPy, to the same bits."""

  def in_graph(self, encoded: tf.Tensor, uniforms: tf.Tensor) -> Any:
    """Prepare an encoded image, string (), with float64 (k,)."""

  def in_numpy(self, encoded: bytes, uniforms: np.ndarray) -> Any:
    """Prepare an encoded image, or raise `DataError`."""


# What a preparation returns, and the label.
Example = tuple[Any, np.ndarray]
# Images, labels and offsets, (b, ...) each.
BatchRows = tuple[np.ndarray, np.ndarray, np.ndarray]


class Source(Protocol):
  """The examples of a split: encoded images, each with its label.

  A label is int32 () of "classes", float32 (c,) of "labels", float64 (c,) of
  "values".
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
    """Yield the batch of each start; an `ExampleError` of one is raised."""

  def take(self, indices: np.ndarray) -> Source:
    """The examples of some indices."""

  def renumbered(self, numbers: np.ndarray) -> Source:
    """Renumber the classes of the examples by int32 (c,)."""

  def decoded(self, images: Sequence[bytes], labels: np.ndarray) -> Source:
    """Replace the images by decoded ones, of `raw_images`."""

"""Read and prepare the examples of files and of TFDS by tf.data."""

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from memory_vit.data import parallel, random_decisions
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.source import (
  PREFETCH,
  BatchRows,
  Example,
  ExampleError,
  Inputs,
  Preparation,
)

# Maps the index of an example, int64 (), to (encoded image, label). The image
# is a scalar string tensor. The function runs eagerly and in tf.data graphs.
Fetch = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
_Graph = Callable[[tf.Tensor, tf.Tensor], tuple[Any, tf.Tensor]]


@dataclasses.dataclass(frozen=True, eq=False)
class GraphSource:
  """Source of examples that a TensorFlow function reads."""

  fetch: Fetch
  # {preparation: traced function}. All pipelines share the traced functions,
  # so that no function is traced twice: each batch with a broken image makes
  # two more pipelines.
  _graphs: dict[Preparation, _Graph] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def read(self, index: int) -> tuple[bytes, np.ndarray]:
    try:
      encoded, label = self.fetch(tf.constant(index, tf.int64))
    # In eager mode, a reader may raise exceptions of any type.
    except Exception as error:
      raise ExampleError(parallel.reason_of(error)) from error
    return encoded.numpy(), label.numpy()

  def labels(
    self, indices: Sequence[int] | np.ndarray
  ) -> Iterator[np.ndarray | ExampleError]:
    numbers = tf.data.Dataset.from_tensor_slices(np.array(indices, np.int64))
    return parallel.attempts(numbers, lambda index: self.fetch(index)[1])

  def examples(
    self,
    prepare: Preparation,
    indices: Sequence[int] | np.ndarray,
    uniforms: np.ndarray | None = None,
  ) -> Iterator[Example | ExampleError]:
    numbers = np.array(indices, np.int64)
    if uniforms is None:
      uniforms = random_decisions.undecided(numbers)
    dataset = tf.data.Dataset.from_tensor_slices((numbers, uniforms))
    return parallel.attempts(dataset, self._graph(prepare))

  def batches(
    self, prepare: Preparation, inputs: Callable[[int], Inputs], starts: range
  ) -> Generator[BatchRows]:
    graph, rows = self._graph(prepare), len(inputs(starts[0]).indices)

    def decided(start: tf.Tensor) -> tuple[tf.Tensor, ...]:
      kinds = (tf.int64, tf.float64, tf.int64)
      indices, uniforms, offsets = tf.numpy_function(
        lambda start: tuple(inputs(int(start))), [start], kinds
      )
      return (
        tf.ensure_shape(indices, (rows,)),
        tf.ensure_shape(uniforms, (rows, None)),
        tf.ensure_shape(offsets, (rows,)),
      )

    def make(
      index: tf.Tensor, uniforms: tf.Tensor, offset: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
      return *graph(index, uniforms), offset

    first = tf.data.Dataset.range(starts.start, starts.stop, starts.step)
    prepared = parallel.parallel_map(first.map(decided).unbatch(), make)
    batched = prepared.batch(rows, drop_remainder=True).prefetch(PREFETCH)
    try:
      yield from batched.as_numpy_iterator()
    except tf.errors.OpError as error:
      raise ExampleError(parallel.reason_of(error)) from error

  def take(self, indices: np.ndarray) -> "GraphSource":
    chosen = tf.constant(indices, tf.int64)
    return GraphSource(lambda index: self.fetch(tf.gather(chosen, index)))

  def renumbered(self, numbers: np.ndarray) -> "GraphSource":
    def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      image, label = self.fetch(index)
      return image, tf.gather(numbers, label)

    return GraphSource(fetch)

  def decoded(
    self, images: Sequence[bytes], labels: np.ndarray
  ) -> "GraphSource":
    numbers = tf.constant(labels)

    def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      # Read the image from the list: a tensor would be a copy of all images.
      image = tf.numpy_function(images.__getitem__, [index], tf.string)
      return tf.ensure_shape(image, ()), tf.gather(numbers, index)

    return GraphSource(fetch)

  def _graph(self, prepare: Preparation) -> _Graph:
    """Return a traced function that reads and prepares an example.

    The function takes an index, int64 (), and random numbers, float64 (k,). It
    returns (prepared image, label).
    """
    if prepare not in self._graphs:

      def make(index: tf.Tensor, uniforms: tf.Tensor) -> tuple[Any, tf.Tensor]:
        encoded, label = self.fetch(index)
        return prepare.in_graph(encoded, uniforms), label

      self._graphs[prepare] = tf.function(
        make,
        input_signature=[
          tf.TensorSpec((), tf.int64), tf.TensorSpec((None,), tf.float64)
        ],
        autograph=False,
      )  # fmt: skip
    return self._graphs[prepare]


def from_tensors(images: tf.Tensor, labels: tf.Tensor) -> GraphSource:
  """Return a source of images, string (n,), and labels, (n,) or (n, c)."""
  return GraphSource(
    lambda index: (tf.gather(images, index), tf.gather(labels, index))
  )

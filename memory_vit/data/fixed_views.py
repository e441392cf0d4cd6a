"""Fixed views of the examples of a split, by place, for what is kept of them.

What is computed once and read in many epochs needs views that do not change:
view v of record r depends on the seed, r and v alone. A process has places 0,
1, ... for the views that it keeps; any run of them can be made by itself.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from memory_vit.config import TrainDataConfig
from memory_vit.data import batching, image_ops, pipeline
from memory_vit.data.pipeline import Batch, ExampleFn
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.split import Split
from memory_vit.errors import DataError
from memory_vit.model.task import EvalPreprocessing


@dataclasses.dataclass(frozen=True)
class FixedViews:
  """The views of a split that a process keeps.

  Attributes:
    split: of the split.
    numbers: int64 (n,), of every place view * size + record.
    image: number, int64 (), and encoded image, string () -> float32
      (side, side, 3) in [-1, 1].
  """

  split: Split
  numbers: np.ndarray
  image: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

  def batches(self, starts: range, rows: int) -> Iterator[Batch]:
    """Batches of the `rows` places from each of `starts` on.

    Returns:
      Iterator over {"image": float32 (b, side, side, 3), "label": int32 (b,),
      "mask": float32 (b,)}. Behind the last place it is repeated, with mask 0.
      An example that cannot be read has mask 0 as well, where the split allows
      it: the next readable record of the split is in its place.
    """
    size, last = self.split.size, len(self.numbers) - 1
    numbers = tf.constant(self.numbers, tf.int64)

    def number_of(place: tf.Tensor) -> tf.Tensor:
      return tf.gather(numbers, tf.minimum(place, last))

    def prepare(
      place: tf.Tensor, encoded: tf.Tensor, label: tf.Tensor
    ) -> dict[str, tf.Tensor]:
      return {
        "image": self.image(number_of(place), encoded),
        "label": label,
        "mask": tf.cast(place <= last, tf.float32),
      }

    example = ExampleFn(
      self.split, lambda place: number_of(place) % size, prepare
    )
    return pipeline.batches(example, starts, rows)


def training_views(
  split: Split,
  data: TrainDataConfig,
  *,
  image_size: int,
  seed: int,
  views: int,
  interpolation: str = "bilinear",
) -> FixedViews:
  """The training views that this process keeps: of every p-th record.

  Args:
    split: of the training split.
    data: how images are cropped and mirrored.
    image_size: side of the square, in pixels.
    seed: of the crops.
    interpolation: see `image_ops.train_image`.
    views: k; places are those of the first view, then those of the second, ...

  Raises:
    DataError: for fewer records than there are processes.
    ConfigError: for a crop that is impossible.
  """
  count = jax.process_count()
  if split.size < count:
    raise DataError(
      f"{split} has {split.size} examples, expected at least one for "
      f"each of the {count} processes, which keep their own."
    )
  if data.train_crop == "small":
    image_ops.shorter_side(data.resize, image_size)
  records = np.arange(jax.process_index(), split.size, count, dtype=np.int64)
  offsets = np.arange(views, dtype=np.int64)[:, None] * split.size

  def image(number: tf.Tensor, encoded: tf.Tensor) -> tf.Tensor:
    key = tf.stack([tf.constant(seed, tf.int64), number])
    return image_ops.train_image(
      encoded,
      key,
      data=data,
      image_size=image_size,
      interpolation=interpolation,
    )

  return FixedViews(split, (offsets + records[None]).ravel(), image)


def evaluation_views(
  split: Split, preprocessing: EvalPreprocessing, *, batch_size: int
) -> FixedViews:
  """What this process evaluates of a split, in the order of `eval_batches`.

  Args:
    split: of the split.
    preprocessing: of its images.
    batch_size: b, of all processes together.
  """
  rows, first = batching.share(batch_size)
  starts = np.arange(first, max(split.size, first + 1), batch_size)
  numbers = (starts[:, None] + np.arange(rows)[None]).ravel()
  # A process without any keeps the last one, which does not count there.
  examples = numbers[numbers < split.size] if first < split.size else [-1]
  return FixedViews(
    split,
    np.asarray(examples, np.int64) % split.size,
    lambda number, encoded: image_ops.eval_image(encoded, preprocessing),
  )


def drawn_places(
  numbers: np.ndarray, size: int, views: int, seed: int
) -> np.ndarray:
  """The places that training takes: each epoch another order, and view.

  Args:
    numbers: int64 (b,), of training examples: 0, 1, 2, ... without end.
    size: records of which views are kept.
    views: k; epoch e takes view e mod k.
    seed: of the order, which is that of `batching.train_batches`.

  Returns:
    int64 (b,), from 0 to k * size - 1.
  """
  order = batching.shuffled(tf.constant(numbers, tf.int64), size, seed)
  return (numbers // size % views) * size + order.numpy()

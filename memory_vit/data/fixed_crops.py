"""Fixed crops of the examples of a split, whose outputs are cached.

Outputs that are computed once and used in many epochs need crops that do not
change: crop v of record r depends on the seed, r and v alone. A process numbers
its crops as places 0, 1, ... and can compute any range of places separately.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from memory_vit.config import DataConfig
from memory_vit.data import batching, pipeline, random_decisions
from memory_vit.data.pipeline import Batch, ExampleFn
from memory_vit.data.preparations import EvalImage, TrainCrop
from memory_vit.data.source import Preparation
from memory_vit.data.split import Split
from memory_vit.errors import DataError
from memory_vit.model.task import EvalPreprocessing


@dataclasses.dataclass(frozen=True)
class FixedCrops:
  """Crops of a split for which a process caches backbone outputs.

  Attributes:
    split: the examples.
    numbers: int64 (n,), crop number * `split.size` + record.
    prepare: makes the images, float32 (side, side, 3) in [-1, 1].
    seed: random seed of the crops; None in evaluation.
  """

  split: Split
  numbers: np.ndarray
  prepare: Preparation
  seed: int | None = None

  def batches(self, starts: range, rows: int) -> Iterator[Batch]:
    """Return batches, with "mask", of `numbers[start : start + rows]`.

    Past the end of `numbers`, the last crop is repeated with mask 0. Unreadable
    examples have mask 0, too, and are replaced by the next readable record.
    """
    last = len(self.numbers) - 1

    def numbers_of(places: np.ndarray) -> np.ndarray:
      return self.numbers[np.minimum(places, last)]

    def uniforms(places: np.ndarray) -> np.ndarray:
      if self.seed is None:
        return random_decisions.undecided(places)
      return random_decisions.uniforms(self.seed, numbers_of(places))

    example = ExampleFn(
      split=self.split,
      records=lambda places: numbers_of(places) % self.split.size,
      prepare=self.prepare,
      uniforms=uniforms,
      counts=lambda places: (places <= last).astype(np.float32),
    )
    return pipeline.batches(example, starts, rows)


def training_crops(
  split: Split,
  data: DataConfig,
  *,
  image_size: int,
  seed: int,
  crops: int,
  interpolation: str = "bilinear",
) -> FixedCrops:
  """Return the crops of this process: crop 0 of its records, then crop 1 ..."""
  count = jax.process_count()
  if split.size < count:
    raise DataError(
      f"{split} has {split.size} examples, expected at least one for each of "
      f"the {count} processes: each process caches a part of the examples."
    )
  records = np.arange(jax.process_index(), split.size, count, dtype=np.int64)
  offsets = np.arange(crops, dtype=np.int64)[:, None] * split.size
  prepare = TrainCrop(data, image_size, interpolation)
  numbers = (offsets + records[None]).ravel()
  return FixedCrops(split, numbers, prepare, seed)


def evaluation_crops(
  split: Split, preprocessing: EvalPreprocessing, *, batch_size: int
) -> FixedCrops:
  """Return the examples that this process evaluates, as in `eval_batches`."""
  rows, first = batching.share(batch_size)
  starts = np.arange(first, max(split.size, first + 1), batch_size)
  numbers = (starts[:, None] + np.arange(rows)[None]).ravel()
  # If a process has no example to evaluate, give it the last example of the
  # split (-1): evaluation masks this example out.
  examples = numbers[numbers < split.size] if first < split.size else [-1]
  return FixedCrops(
    split,
    np.asarray(examples, np.int64) % split.size,
    EvalImage(preprocessing),
  )


def drawn_places(
  numbers: np.ndarray, size: int, crops: int, seed: int
) -> np.ndarray:
  """Return crop * size + record, int64 (b,); epoch e uses crop e % `crops`."""
  order = random_decisions.shuffled(numbers, size, seed)
  return (numbers // size % crops) * size + order

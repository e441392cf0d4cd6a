"""Plan the rows of a split to cache: their crops or embeddings, and layout."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from memory_vit.cache.rows import RowLayout
from memory_vit.config import Config, data_seed
from memory_vit.data import batching, fixed_crops
from memory_vit.data.fixed_crops import FixedCrops
from memory_vit.data.split import Split
from memory_vit.model.regimes import get_regime
from memory_vit.model.task import EvalPreprocessing

# A function from images (b, side, side, 3) to the outputs of the frozen pass, a
# pytree of arrays (b, ...).
Prepare = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared by ==
class FixedEmbeddings:
  """The embeddings that a process caches; the counterpart of `FixedCrops`.

  Embeddings are cached in the order of their files, so that each file is read
  once: the embedding of example i of this process is at place `places[i]`.
  """

  split: Split
  numbers: np.ndarray  # int64 (n,): number of the example at each place
  places: np.ndarray  # int64 (n,)
  name: str  # embedding column: "pooled" for a head, "layers" for a probe

  @classmethod
  def of(
    cls, split: Split, numbers: np.ndarray, regime: str
  ) -> "FixedEmbeddings":
    """Select what a regime needs of the examples `numbers`, int64 (n,)."""
    embedded = split.embedded
    assert embedded is not None
    order = np.argsort(embedded.rows[numbers], kind="stable")
    column = get_regime(regime).column
    return cls(split, numbers[order], np.argsort(order), column)

  def batches(self, starts: range, rows: int) -> Iterator[dict[str, Any]]:
    """Yield batches of `rows` rows, which begin at the places `starts`.

    Padding rows after the last place have mask 0.
    """
    source = self.split
    assert source.embedded is not None
    assert source.labels is not None
    origin = source.embedded.origin
    numbers = self.numbers[starts.start : starts.stop]
    values = source.embedded.take(numbers).values(self.name)
    for i in range(len(starts)):
      examples = numbers[i * rows : (i + 1) * rows]
      inputs = np.zeros((rows, *origin.shapes[self.name]), origin.kind)
      label = np.zeros(rows, source.label_dtype)
      mask = np.zeros(rows, np.float32)
      for row, _ in enumerate(examples):
        inputs[row] = next(values)
      label[: len(examples)] = source.labels[examples]
      mask[: len(examples)] = 1
      yield {"inputs": {self.name: inputs}, "label": label, "mask": mask}


@dataclasses.dataclass(frozen=True)
class SplitPlan:
  """The rows of a split that this process caches."""

  role: str  # "training", "validation" or "test"
  examples: FixedCrops | FixedEmbeddings
  # Index of each batch's first row; all processes have equally many batches.
  starts: range
  # {name: JSON value} of all options that determine the prepared images.
  facts: Mapping[str, Any]
  layout: RowLayout

  @property
  def count(self) -> int:
    return len(self.examples.numbers)

  def count_in(self, spans: Sequence[range]) -> int:
    """Return the number of rows in spans of places, without padding."""
    return sum(len(range(self.count)[s.start : s.stop]) for s in spans)


def split_plan(
  config: Config,
  preprocessing: EvalPreprocessing,
  key: str,
  split: Split,
  prepare: Prepare,
) -> SplitPlan:
  """Plan the rows of the split `key`: "train", "validation" or "test"."""
  examples: FixedCrops | FixedEmbeddings
  if key == "train":
    role, count = "training", config.cache.crops
    batch = config.batch_size // config.optim.accumulation_steps
    examples = fixed_crops.training_crops(
      split,
      config.data,
      image_size=config.image_size,
      seed=data_seed(config),
      crops=count,
      interpolation=preprocessing.interpolation,
    )
    facts = training_facts(config, preprocessing)
  else:
    role, count, batch = key, 1, config.batch_size_eval
    examples = fixed_crops.evaluation_crops(
      split, preprocessing, batch_size=batch
    )
    facts = dataclasses.asdict(preprocessing)
  embedded, dtype = split.embedded, config.cache.dtype
  if embedded:
    examples = FixedEmbeddings.of(split, examples.numbers, config.regime)
    if embedded.origin.stored == "bfloat16":  # the values are already rounded
      dtype = "bfloat16"
  rows, _ = batching.share(batch)
  # All processes make as many batches as process 0, which has the most records.
  most = -(-split.size // jax.process_count()) * count
  side = config.image_size
  images = jax.ShapeDtypeStruct((batch, side, side, 3), np.float32)
  return SplitPlan(
    role,
    examples,
    range(0, -(-most // rows) * rows, rows),
    facts,
    RowLayout.of(jax.eval_shape(prepare, images), dtype, split.label_dtype),
  )


def training_facts(
  config: Config, preprocessing: EvalPreprocessing
) -> dict[str, Any]:
  """Return the facts that determine the training crops, as JSON values."""
  data, crops = config.data, config.cache.crops
  return {
    "crop": data.train_crop,
    "flip": data.flip,
    "interpolation": preprocessing.interpolation,
    "crops": crops,
    # If `crops` is 1, the crop is not random: `resize` and the seed change
    # nothing, and runs that differ only in these two options share rows.
    "resize": data.resize if crops > 1 else 0,
    "seed": data_seed(config) if crops > 1 else 0,
  }

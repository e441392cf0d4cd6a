"""Which rows a run caches of a split."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from memory_vit.config import Config, data_seed
from memory_vit.data import batching, fixed_views
from memory_vit.data.fixed_views import FixedViews
from memory_vit.data.split import Split
from memory_vit.frozen.embedded_views import EmbeddedViews
from memory_vit.frozen.layout import RowLayout
from memory_vit.model.task import EvalPreprocessing

# Images (b, side, side, 3) -> what is frozen of them: a tree of (b, ...).
Prepare = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class SplitPlan:
  """The rows of a split that this process caches.

  Attributes:
    role: "training", "validation" or "test".
    views: of every place, or embeddings.
    starts: places at which its batches start, as many on every process.
    facts: what the images depend on, as JSON values.
    prepare: the program of the frozen pass.
    layout: of a row.
  """

  role: str
  views: FixedViews | EmbeddedViews
  starts: range
  facts: Mapping[str, Any]
  prepare: Prepare
  layout: RowLayout

  @property
  def count(self) -> int:
    """The number of rows."""
    return len(self.views.numbers)

  def count_in(self, spans: Sequence[range]) -> int:
    """The number of rows in spans of places; what lies behind is padding."""
    return sum(len(range(self.count)[s.start : s.stop]) for s in spans)


def split_plan(
  config: Config,
  preprocessing: EvalPreprocessing,
  key: str,
  reader: Split,
  prepare: Prepare,
) -> SplitPlan:
  """Plan the rows of a split.

  Args:
    config: of the run.
    preprocessing: of evaluation, whose interpolation squeezed images have.
    key: "train", "validation" or "test".
    reader: of the split.
    prepare: the program of the frozen pass.
  """
  views: FixedViews | EmbeddedViews
  if key == "train":
    role, count = "training", config.keep.views
    batch = config.batch_size // config.optim.accumulation_steps
    views = fixed_views.training_views(
      reader,
      config.data,
      image_size=config.image_size,
      seed=data_seed(config),
      views=count,
      interpolation=preprocessing.interpolation,
    )
    facts = training_facts(config, preprocessing)
  else:
    role, count, batch = key, 1, config.batch_size_eval
    views = fixed_views.evaluation_views(
      reader, preprocessing, batch_size=batch
    )
    facts = dataclasses.asdict(preprocessing)
  embedded, dtype = reader.embedded, config.keep.dtype
  if embedded:
    views = EmbeddedViews.of(reader, views.numbers, config.regime)
    if embedded.origin.stored == "bfloat16":  # nothing is lost
      dtype = "bfloat16"
  rows, _ = batching.share(batch)
  # As many batches on every process: the first one has most records.
  most = -(-reader.size // jax.process_count()) * count
  side = config.image_size
  images = jax.ShapeDtypeStruct((batch, side, side, 3), np.float32)
  return SplitPlan(
    role,
    views,
    range(0, -(-most // rows) * rows, rows),
    facts,
    prepare,
    RowLayout.of(jax.eval_shape(prepare, images), dtype),
  )


def training_facts(
  config: Config, preprocessing: EvalPreprocessing
) -> dict[str, Any]:
  """What the views of a training split depend on, as JSON values."""
  data, views = config.data, config.keep.views
  return {
    "crop": data.train_crop,
    "flip": data.flip,
    "interpolation": preprocessing.interpolation,
    "views": views,
    # Where nothing is random, runs with other seeds share the rows.
    "resize": data.resize if views > 1 else 0,
    "seed": data_seed(config) if views > 1 else 0,
  }

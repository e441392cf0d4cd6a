"""Which rows a run keeps of a split, and what they depend on."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from memory_vit.config import Config, data_seed
from memory_vit.data import batching, fixed_views
from memory_vit.data.fixed_views import FixedViews
from memory_vit.data.reader import Reader
from memory_vit.frozen.embedded_views import EmbeddedViews
from memory_vit.model.task import EvalPreprocessing

# Wings whose code decides what is in a row.
_WINGS = ("model", "backbones", "tasks", "images", "data", "frozen")


@dataclasses.dataclass(frozen=True)
class SplitPlan:
  """The rows of a split that this process keeps.

  Attributes:
    role: "training", "validation" or "test".
    views: of every place, or embeddings.
    starts: places at which its batches start, as many on every process.
    facts: what the images depend on, as JSON values.
  """

  role: str
  views: FixedViews | EmbeddedViews
  starts: range
  facts: Mapping[str, Any]

  @property
  def count(self) -> int:
    """The number of rows."""
    return len(self.views.numbers)


def training_plan(
  config: Config, preprocessing: EvalPreprocessing, reader: Reader
) -> SplitPlan:
  """Plan the views of the training split.

  Args:
    config: of the run.
    preprocessing: of evaluation, whose interpolation squeezed images have.
    reader: of the split.
  """
  data, keep = config.data, config.keep
  views = fixed_views.training_views(
    reader,
    data,
    image_size=config.image_size,
    seed=data_seed(config),
    views=keep.views,
    interpolation=preprocessing.interpolation,
  )
  rows, _ = batching.share(config.batch_size // config.optim.accumulation_steps)
  # As many batches on every process: the first one has most records.
  most = -(-reader.size // jax.process_count()) * keep.views
  facts = {
    "crop": data.train_crop,
    "flip": data.flip,
    "interpolation": preprocessing.interpolation,
    "views": keep.views,
    # Where nothing is random, runs with other seeds share what is kept.
    "resize": data.resize if keep.views > 1 else 0,
    "seed": data_seed(config) if keep.views > 1 else 0,
  }
  starts = range(0, -(-most // rows) * rows, rows)
  return SplitPlan("training", views, starts, facts)


def validation_plan(
  config: Config,
  preprocessing: EvalPreprocessing,
  reader: Reader,
  role: str = "validation",
) -> SplitPlan:
  """Plan what is evaluated of a split; see `training_plan`."""
  size = config.batch_size_eval
  views = fixed_views.evaluation_views(reader, preprocessing, batch_size=size)
  rows, _ = batching.share(size)
  starts = range(0, -(-reader.size // size) * rows, rows)
  facts = dataclasses.asdict(preprocessing)
  return SplitPlan(role, views, starts, facts)


def of_embeddings(plan: SplitPlan, config: Config) -> SplitPlan:
  """The plan of a split whose rows are read from embeddings, in their order."""
  views = EmbeddedViews.of(plan.views.reader, plan.views.numbers, config.regime)
  return dataclasses.replace(plan, views=views)


@functools.cache
def code_digest() -> str:
  """SHA-256 of the code that decides what is in a row."""
  digest = hashlib.sha256()
  package = Path(__file__).parents[1]
  for wing in _WINGS:
    for file in sorted((package / wing).rglob("*.py")):
      digest.update(file.relative_to(package).as_posix().encode())
      digest.update(file.read_bytes())
  return digest.hexdigest()


def key_of(facts: Mapping[str, Any]) -> str:
  """A name for what rows depend on: equal facts, equal names."""
  text = json.dumps(facts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]

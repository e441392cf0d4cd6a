"""What a run keeps of its splits, and the batches that are made of it."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.config import Config, data_seed
from memory_vit.data import batching, fixed_views
from memory_vit.data.fixed_views import FixedViews
from memory_vit.data.reader import Reader
from memory_vit.kept import compute
from memory_vit.kept.layout import RowLayout
from memory_vit.kept.rows import DeviceRows, HostRows, Rows
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime.preemption import StopSignal

logger = logging.getLogger(__name__)

# Images (b, side, side, 3) -> what is kept of them, a tree of arrays (b, ...).
Prepare = Callable[[Any], Any]
Batches = Iterator[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class KeptSplit:
  """A split of which the frozen part is kept.

  Attributes:
    rows: by place.
    labels: int32 (n,).
    masks: float32 (n,), 1 for examples that count in an evaluation.
  """

  rows: Rows
  labels: np.ndarray
  masks: np.ndarray


class Kept:
  """The frozen part of a run, computed when it is first asked for."""

  def __init__(
    self,
    config: Config,
    preprocessing: EvalPreprocessing,
    mesh: Mesh,
    stop: StopSignal,
  ) -> None:
    """Nothing is computed yet.

    Args:
      config: of the run; `config.keep` says what is kept.
      preprocessing: of images that are evaluated.
      mesh: over which batches are split.
      stop: is asked while it is computed.
    """
    self._config, self._preprocessing = config, preprocessing
    self._mesh, self._stop = mesh, stop
    self._splits: dict[str, KeptSplit] = {}

  def train_batches(
    self, reader: Reader, prepare: Prepare, start: int
  ) -> Batches:
    """Batches for training, without end; what is missing is computed first.

    Every process draws its share of a batch from its own records, each of its
    epochs in another order: with one process the order is that of
    `batching.train_batches`.

    Args:
      reader: of the training split.
      prepare: the program of the frozen pass.
      start: examples that were used before.

    Returns:
      Iterator over {"inputs": tree of arrays (b, ...), "label": int32 (b / p,)
      of this process}.
    """
    config, size = self._config, self._training_size(reader)
    rows, _ = batching.share(config.batch_size)
    kept = self._training(reader, prepare)

    def generate() -> Batches:
      number = start // jax.process_count()
      while True:
        places = fixed_views.drawn_places(
          np.arange(number, number + rows), size, config.keep.views,
          data_seed(config),
        )  # fmt: skip
        yield {"inputs": kept.rows.take(places), "label": kept.labels[places]}
        number += rows

    return generate()

  def train_examples(self, reader: Reader, step: int) -> list[str]:
    """Name the examples of a step (from 1): see `batching.train_examples`."""
    config, count = self._config, jax.process_count()
    rows, _ = batching.share(config.batch_size)
    numbers = np.arange((step - 1) * rows, step * rows)
    records: list[int] = []
    for i in range(count):
      size = len(range(i, reader.size, count))
      places = fixed_views.drawn_places(numbers, size, 1, data_seed(config))
      records += [int(place) * count + i for place in places]
    return batching.names_of(reader, records)

  def eval_batches(self, reader: Reader, prepare: Prepare) -> Batches:
    """The batches of `batching.eval_batches`, with "inputs" for "image"."""
    kept = self._evaluation(reader, prepare)
    rows, _ = batching.share(self._config.batch_size_eval)
    last = len(kept.labels) - 1
    for start in self._starts_of_evaluation(reader):
      places = np.arange(start, start + rows)
      counts = places <= last
      places = np.minimum(places, last)
      yield {
        "inputs": kept.rows.take(places),
        "label": kept.labels[places],
        "mask": kept.masks[places] * counts.astype(np.float32),
      }

  def _training(self, reader: Reader, prepare: Prepare) -> KeptSplit:
    if "train" not in self._splits:
      config = self._config
      views = fixed_views.training_views(
        reader,
        config.data,
        image_size=config.image_size,
        seed=data_seed(config),
        views=config.keep.views,
        interpolation=self._preprocessing.interpolation,
      )
      rows, _ = batching.share(
        config.batch_size // config.optim.accumulation_steps
      )
      # As many batches on every process: the first one has most records.
      most = -(-reader.size // jax.process_count()) * config.keep.views
      starts = range(0, -(-most // rows) * rows, rows)
      self._splits["train"] = self._compute("training", views, starts, prepare)
    return self._splits["train"]

  def _evaluation(self, reader: Reader, prepare: Prepare) -> KeptSplit:
    if "validation" not in self._splits:
      views = fixed_views.evaluation_views(
        reader,
        self._preprocessing,
        batch_size=self._config.batch_size_eval,
      )
      starts = self._starts_of_evaluation(reader)
      self._splits["validation"] = self._compute(
        "validation", views, starts, prepare
      )
    return self._splits["validation"]

  def _starts_of_evaluation(self, reader: Reader) -> range:
    """First places of the batches of an evaluation, on every process."""
    size = self._config.batch_size_eval
    rows, _ = batching.share(size)
    return range(0, -(-reader.size // size) * rows, rows)

  def _training_size(self, reader: Reader) -> int:
    """How many records this process keeps."""
    return len(range(jax.process_index(), reader.size, jax.process_count()))

  def _compute(
    self, role: str, views: FixedViews, starts: range, prepare: Prepare
  ) -> KeptSplit:
    """Compute the rows of a split."""
    keep, count = self._config.keep, len(views.numbers)
    side = self._config.image_size
    rows_of_all = starts.step * jax.process_count()
    image = jax.ShapeDtypeStruct((rows_of_all, side, side, 3), np.float32)
    layout = RowLayout.of(jax.eval_shape(prepare, image), keep.dtype)
    rows: Rows = (
      DeviceRows(layout, len(starts), self._mesh, starts.step)
      if keep.where == "device"
      else HostRows(layout, count, self._mesh)
    )
    what = f"keeping the {keep.what} of {role}"
    logger.info(
      "%s: %d views of %.2f MB, %.2f GiB in the memory of the %s", what,
      count, layout.nbytes / 1e6, count * layout.nbytes / 2**30, keep.where,
    )  # fmt: skip
    labels, masks = compute.compute(
      views,
      starts,
      prepare,
      rows,
      mesh=self._mesh,
      stop=self._stop,
      progress=compute.PassProgress(what, count * jax.process_count()),
    )
    return KeptSplit(rows, labels[:count], masks[:count])

"""Cache of a run's frozen pass: fill rows of each split, and yield batches."""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.cache import cache_folder, free_space
from memory_vit.cache.plan import (
  FixedEmbeddings,
  Prepare,
  SplitPlan,
  split_plan,
)
from memory_vit.cache.row_file import FileRows
from memory_vit.cache.rows import (
  DeviceRows,
  FilledRows,
  HostRows,
  OrderedRows,
  Rows,
)
from memory_vit.config import Config, data_seed
from memory_vit.data import batching, fixed_crops
from memory_vit.data.batch import inputs_of
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split import Split
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import files, paths, sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.runtime.progress_bar import ProgressBar

logger = logging.getLogger(__name__)

Batches = Iterator[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Needs:
  """Memory or disk space that this process needs for the rows of a split."""

  plan: SplitPlan
  missing: int  # number of rows that are not cached yet

  @property
  def row_bytes(self) -> int:
    return self.plan.layout.nbytes

  @property
  def bytes(self) -> int:
    return self.plan.count * self.row_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCache:
  """Cached outputs of the frozen pass, computed when first needed."""

  config: Config
  backbone: Backbone
  preprocessing: EvalPreprocessing
  record: DataRecord
  prepare: Prepare  # the frozen pass, for all regimes that share the cache
  mesh: Mesh
  stop: StopSignal
  _splits: dict[str, FilledRows] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def train_batches(self, split: Split, start: int) -> Batches:
    """Yield training batches endlessly; missing rows are computed first.

    Each process draws its share of a batch from its own records, shuffled anew
    each epoch. With one process, the order is as in `batching.train_batches`.
    `start` is the number of examples that earlier steps used.
    """
    config = self.config
    size = len(range(jax.process_index(), split.size, jax.process_count()))
    count, _ = batching.share(config.batch_size)
    rows = self.rows("train", split)

    def generate() -> Batches:
      number = start // jax.process_count()
      while True:
        places = fixed_crops.drawn_places(
          np.arange(number, number + count), size, config.cache.crops,
          data_seed(config),
        )  # fmt: skip
        yield {"inputs": rows.take(places), "label": rows.labels[places]}
        number += count

    return generate()

  def train_examples(self, split: Split, step: int) -> list[str]:
    """Return the names of the examples of a step; the first step is 1."""
    config, count = self.config, jax.process_count()
    share, _ = batching.share(config.batch_size)
    numbers = np.arange((step - 1) * share, step * share)
    records: list[int] = []
    for i in range(count):
      size = len(range(i, split.size, count))
      places = fixed_crops.drawn_places(numbers, size, 1, data_seed(config))
      records += [int(place) * count + i for place in places]
    return batching.names_of(split, records)

  def eval_batches(self, split: Split, key: str = "validation") -> Batches:
    """Yield the batches of `batching.eval_batches`, with cached inputs."""
    rows = self.rows(key, split)
    size = self.config.batch_size_eval
    count, first = batching.share(size)
    for i in range(-(-split.size // size)):
      numbers = np.arange(count) + i * size + first
      counts = (numbers < split.size).astype(np.float32)
      places = np.minimum(np.arange(count) + i * count, len(rows.labels) - 1)
      yield {
        "inputs": rows.take(places),
        "label": rows.labels[places],
        "mask": rows.masks[places] * counts,
      }

  def needs(self, key: str, split: Split) -> Needs:
    """Count all and missing rows of a split; all processes must call this."""
    plan = self._plan(key, split)
    if key in self._splits:
      return Needs(plan, 0)
    if self.config.cache.where != "disk":
      return Needs(plan, plan.count)
    rows = self._file_rows(plan, self._folder(key, plan)[0])
    return Needs(plan, plan.count_in(rows.missing()))

  def require_free_space(self, needs: Sequence[Needs]) -> None:
    """Raise `ConfigError` if space is lacking; all processes must call this."""
    needed = sum(n.row_bytes * n.missing for n in needs)
    roles = " and ".join(n.plan.role for n in needs)
    title = f"{self.config.cache.what} of {roles}"
    free_space.require_free_space(
      title, needed, self.config.cache.where, self._root
    )

  @property
  def place(self) -> str:
    """Name of the disk or memory that stores rows, with its free space."""
    place = free_space.place_of(self.config.cache.where, self._root)
    gib = place.free / 2**30
    return f"{place.name}, which has {place.free:,} bytes free ({gib:.2f} GiB)"

  def bytes_on_device(self, needs: Sequence[Needs]) -> int:
    """Return the number of bytes of the rows on each device.

    Rows on the host count if the devices are CPUs, which share host memory.
    """
    where = self.config.cache.where
    if where == "disk" or (where == "host" and jax.default_backend() != "cpu"):
      return 0
    return sum(n.bytes for n in needs) // jax.local_device_count()

  def rows(self, key: str, split: Split) -> FilledRows:
    """Return the complete rows of a split; all processes must call this."""
    if key not in self._splits:
      plan = self._plan(key, split)
      rows: FilledRows
      if self.config.cache.where == "disk":
        rows = self._on_disk(key, plan)
      else:
        rows = self._in_memory(plan)
      if isinstance(plan.examples, FixedEmbeddings):
        rows = OrderedRows(rows, plan.examples.places)
      self._splits[key] = rows
    return self._splits[key]

  def _plan(self, key: str, split: Split) -> SplitPlan:
    return split_plan(self.config, self.preprocessing, key, split, self.prepare)

  def _in_memory(self, plan: SplitPlan) -> Rows:
    self.require_free_space([Needs(plan, plan.count)])
    kind = DeviceRows if self.config.cache.where == "device" else HostRows
    rows = kind(plan.layout, plan.count, self.mesh, plan.starts)
    self._fill(rows, plan, [plan.starts])
    return rows

  def _on_disk(self, key: str, plan: SplitPlan) -> Rows:
    """Return a split's rows; first compute and store rows missing on disk."""
    split = plan.examples.split
    folder, facts = self._folder(key, plan)
    paths.make_directory(folder, "config.cache.dir")
    with cache_folder.locked(folder, self.stop):
      logger.info(
        "%s of %s are cached in %s", self.config.cache.what, plan.role, folder
      )
      files.write_json(folder / "about.json", facts)
      rows = self._file_rows(plan, folder)
      rows.open(functools.partial(self._fill, rows, plan))
      records = plan.examples.numbers[rows.unreadable()] % split.size
      reason = f"it could not be read when {folder} was filled"
      split.mark_unreadable(dict.fromkeys(records.tolist(), reason))
      missing = rows.missing()
      self.require_free_space([Needs(plan, plan.count_in(missing))])
      self._fill(rows, plan, missing)
    return rows

  def _file_rows(self, plan: SplitPlan, folder: Path) -> FileRows:
    path = folder / f"{jax.process_index()}.rows"
    return FileRows(plan.layout, plan.count, self.mesh, plan.starts, path)

  def _folder(self, key: str, plan: SplitPlan) -> tuple[Path, dict[str, Any]]:
    """Return (folder of a split's rows, facts that determine the rows).

    All processes must call this.
    """
    record, data = self.record, plan.examples.split.data_files
    if key not in record.data_files:
      record = DataRecord(by=self.config.data.digest, data_files={key: data})
    facts = cache_folder.dependencies(
      self.config, self.backbone, self.mesh, plan, record.digests[key]
    )
    return self._root / cache_folder.name_of(facts), facts

  @property
  def _root(self) -> Path:
    return cache_folder.root_of(self.config)

  def _fill(self, rows: Rows, plan: SplitPlan, spans: Sequence[range]) -> None:
    """Compute the rows at the places `spans`; all processes must call this."""
    if not spans:
      return
    cache, count = self.config.cache, plan.count_in(spans)
    title, nbytes = f"{cache.what} of {plan.role}", plan.layout.nbytes
    logger.info(
      "caching the %s: %d rows of %.3f MB, %.2f GiB (%s)", title, count,
      nbytes / 1e6, count * nbytes / 2**30, cache.where,
    )  # fmt: skip
    began, size = time.perf_counter(), plan.starts.step
    with ProgressBar(title, count * jax.process_count()) as progress:
      for span in spans:
        batches = plan.examples.batches(span, size)
        for start, batch in zip(span, batches, strict=True):
          self.stop.check()
          read = {k: v for k, v in batch.items() if k in ("image", "inputs")}
          placed = sharding.shard_batch(read, self.mesh)
          inputs = inputs_of(placed, self.prepare)
          rows.put(start, inputs, batch)
          jax.block_until_ready(inputs)
          progress.update(size * jax.process_count())
    logger.info("%s: cached in %.1f s", title, time.perf_counter() - began)

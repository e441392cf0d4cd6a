"""What a run keeps of its splits, and the batches that are made of it."""

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memory_vit.config import Config, data_seed
from memory_vit.data import batching, data_files, fixed_views, image_ops
from memory_vit.data.data_record import DataRecord
from memory_vit.data.reader import Reader
from memory_vit.errors import ConfigError
from memory_vit.frozen import compute, free_space, plan, shards
from memory_vit.frozen.embedded_views import EmbeddedViews
from memory_vit.frozen.layout import RowLayout
from memory_vit.frozen.plan import SplitPlan
from memory_vit.frozen.rows import (
  DeviceRows,
  FilledRows,
  HostRows,
  OrderedRows,
  Rows,
)
from memory_vit.frozen.shards import ShardRows
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import files, lock, paths, processes
from memory_vit.runtime.preemption import StopSignal
from memory_vit.runtime.progress_bar import ProgressBar

logger = logging.getLogger(__name__)

# Images (b, side, side, 3) -> what is kept of them, a tree of arrays (b, ...).
Prepare = Callable[[Any], Any]
Batches = Iterator[dict[str, Any]]
# Of the folders on disk; a new number makes everything again.
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Needs:
  """What keeping a split takes, on this process.

  Attributes:
    plan: of its rows.
    row_bytes: of each.
    missing: rows that are not there yet.
  """

  plan: SplitPlan
  row_bytes: int
  missing: int

  @property
  def bytes(self) -> int:
    """Of all rows."""
    return self.plan.count * self.row_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
  """The frozen part of a run, computed when it is first asked for.

  Attributes:
    config: of the run; `config.keep` says what is kept, and where.
    backbone: that is frozen.
    preprocessing: of images that are evaluated.
    record: of the data of the run.
    mesh: over which batches are split.
    stop: is asked while it is computed.
  """

  config: Config
  backbone: Backbone
  preprocessing: EvalPreprocessing
  record: DataRecord
  mesh: Mesh
  stop: StopSignal
  _splits: dict[str, FilledRows] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

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
    config = self.config
    size = len(range(jax.process_index(), reader.size, jax.process_count()))
    count, _ = batching.share(config.batch_size)
    rows = self.training(reader, prepare)

    def generate() -> Batches:
      number = start // jax.process_count()
      while True:
        places = fixed_views.drawn_places(
          np.arange(number, number + count), size, config.keep.views,
          data_seed(config),
        )  # fmt: skip
        yield {"inputs": rows.take(places), "label": rows.labels[places]}
        number += count

    return generate()

  def train_examples(self, reader: Reader, step: int) -> list[str]:
    """Name the examples of a step (from 1): see `batching.train_examples`."""
    config, count = self.config, jax.process_count()
    share, _ = batching.share(config.batch_size)
    numbers = np.arange((step - 1) * share, step * share)
    records: list[int] = []
    for i in range(count):
      size = len(range(i, reader.size, count))
      places = fixed_views.drawn_places(numbers, size, 1, data_seed(config))
      records += [int(place) * count + i for place in places]
    return batching.names_of(reader, records)

  def eval_batches(
    self, reader: Reader, prepare: Prepare, key: str = "validation"
  ) -> Batches:
    """The batches of `batching.eval_batches`, with "inputs" for "image".

    Args:
      reader: of the split.
      prepare: the program of the frozen pass.
      key: "validation", or "test" of embeddings.
    """
    rows = self._rows(key, reader, prepare)
    size = self.config.batch_size_eval
    count, first = batching.share(size)
    for i in range(-(-reader.size // size)):
      numbers = np.arange(count) + i * size + first
      counts = (numbers < reader.size).astype(np.float32)
      places = np.minimum(np.arange(count) + i * count, len(rows.labels) - 1)
      yield {
        "inputs": rows.take(places),
        "label": rows.labels[places],
        "mask": rows.masks[places] * counts,
      }

  def training(self, reader: Reader, prepare: Prepare) -> FilledRows:
    """The rows of the training split, computed where they are not there."""
    return self._rows("train", reader, prepare)

  def validation(self, reader: Reader, prepare: Prepare) -> FilledRows:
    """The rows of the validation split; see `training`."""
    return self._rows("validation", reader, prepare)

  def needs(self, key: str, reader: Reader, prepare: Prepare) -> Needs:
    """What a split takes, and what of it is missing; nothing is computed.

    All processes must call.

    Args:
      key: "train", "validation" or "test".
      reader: of the split.
      prepare: the program of the frozen pass.
    """
    made = self.plan(key, reader)
    layout, missing = self.layout(made, prepare), made.count
    if self.config.keep.where == "disk":
      folder = self._folder() / plan.key_of(self._facts(key, made, layout))
      # Also where there is none: what others lack, this process makes as well.
      rows = ShardRows(layout, made.count, self.mesh, made.starts, folder)
      missing = _count(made, rows.missing())
    return Needs(made, layout.nbytes, missing)

  def require_room(self, needs: Sequence[Needs]) -> None:
    """Raise `ConfigError` where splits do not fit together; all must call."""
    disk = self.config.keep.where == "disk"
    needed = sum(
      n.row_bytes * (n.missing if disk else n.plan.count) for n in needs
    )
    roles = " and ".join(n.plan.role for n in needs)
    what = f"{self.config.keep.what} of {roles}"
    free_space.require_room(
      what, needed, self.config.keep.where, self._folder()
    )

  def require_room_for(
    self, readers: Mapping[str, Reader], prepare: Prepare
  ) -> None:
    """Raise `ConfigError` where what is not kept yet does not fit together.

    All processes must call. What a folder on disk lacks is known once it is
    opened.

    Args:
      readers: {"train": of that split, "validation": ...}.
      prepare: the program of the frozen pass.
    """
    needs = []
    for key, reader in readers.items():
      if key in self._splits:
        continue
      made = self.plan(key, reader)
      layout = self.layout(made, prepare)
      facts = self._facts(key, made, layout)
      exists = (self._folder() / plan.key_of(facts)).is_dir()
      if self.config.keep.where != "disk" or not exists:
        needs.append(Needs(made, layout.nbytes, made.count))
    self.require_room(needs)

  @property
  def place(self) -> str:
    """Where rows are kept, and what is free there."""
    place = free_space.place_of(self.config.keep.where, self._folder())
    gib = place.free / 2**30
    return f"{place.name}, which has {place.free:,} bytes free ({gib:.2f} GiB)"

  def bytes_on_device(self, needs: Sequence[Needs]) -> int:
    """Bytes that splits take of the memory of a device, or of its share.

    A CPU has no memory but that of the host, which its devices share.
    """
    where = self.config.keep.where
    if where == "disk" or (where == "host" and jax.default_backend() != "cpu"):
      return 0
    return sum(n.bytes for n in needs) // jax.local_device_count()

  def plan(self, key: str, reader: Reader) -> SplitPlan:
    """Which rows are kept of the split "train", "validation" or "test"."""
    config, preprocessing = self.config, self.preprocessing
    if key == "train":
      made = plan.training_plan(config, preprocessing, reader)
    else:
      made = plan.validation_plan(config, preprocessing, reader, key)
    return plan.of_embeddings(made, config) if reader.source.embedded else made

  def _rows(self, key: str, reader: Reader, prepare: Prepare) -> FilledRows:
    if key not in self._splits:
      made = self.plan(key, reader)
      rows: FilledRows
      if self.config.keep.where == "disk":
        rows = self._on_disk(key, made, prepare)
      else:
        rows = self._in_memory(made, prepare)
      if isinstance(made.views, EmbeddedViews):
        rows = OrderedRows(rows, made.views.places)
      self._splits[key] = rows
    return self._splits[key]

  def layout(self, made: SplitPlan, prepare: Prepare) -> RowLayout:
    """The layout of a row, from the shapes alone."""
    side = self.config.image_size
    count = made.starts.step * jax.process_count()
    image = jax.ShapeDtypeStruct((count, side, side, 3), np.float32)
    dtype, embedded = self.config.keep.dtype, made.views.reader.source.embedded
    if embedded and embedded.origin.stored == "bfloat16":  # nothing is lost
      dtype = "bfloat16"
    return RowLayout.of(jax.eval_shape(prepare, image), dtype)

  def _in_memory(self, made: SplitPlan, prepare: Prepare) -> Rows:
    """Rows that end with the run."""
    layout, where = self.layout(made, prepare), self.config.keep.where
    what = f"{self.config.keep.what} of {made.role}"
    free_space.require_room(what, made.count * layout.nbytes, where, Path())
    kind = DeviceRows if where == "device" else HostRows
    rows = kind(layout, made.count, self.mesh, made.starts)
    self._fill(rows, made, layout, prepare)
    return rows

  def _on_disk(self, key: str, made: SplitPlan, prepare: Prepare) -> Rows:
    """Rows that later runs find again."""
    layout, reader = self.layout(made, prepare), made.views.reader
    _require_known(reader)
    facts = self._facts(key, made, layout)
    folder = self._folder() / plan.key_of(facts)
    paths.make_directory(folder, "config.keep.dir")
    with self._locked(folder / ".lock"):
      shards.tidy(folder)
      rows = ShardRows(
        layout, made.count, self.mesh, made.starts, folder,
        lambda: reader.unreadable,
      )  # fmt: skip
      reader.mark_unreadable(rows.unreadable)
      text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
      about = folder / "about.json"
      with files.writing(about), files.replacing(about) as part:
        part.write_text(text, encoding="utf-8")
      logger.info(
        "the %s of %s are kept in %s", self.config.keep.what, made.role, folder
      )
      self._fill(rows, made, layout, prepare)
    return rows

  def _fill(
    self, rows: Rows, made: SplitPlan, layout: RowLayout, prepare: Prepare
  ) -> None:
    """Compute what is missing, if there is room for it."""
    keep, spans = self.config.keep, rows.missing()
    count = _count(made, spans)
    what = f"{keep.what} of {made.role}"
    if keep.where == "disk":
      free_space.require_room(
        what, count * layout.nbytes, "disk", self._folder()
      )
    if not spans:
      return
    logger.info(
      "keeping the %s: %d views of %.3f MB, %.2f GiB (%s)", what, count,
      layout.nbytes / 1e6, count * layout.nbytes / 2**30, keep.where,
    )  # fmt: skip
    began = time.perf_counter()
    with ProgressBar(what, count * jax.process_count()) as progress:
      for span in spans:
        compute.compute(
          made.views, span, prepare, rows,
          mesh=self.mesh, stop=self.stop, progress=progress,
        )  # fmt: skip
    logger.info("%s: kept in %.1f s", what, time.perf_counter() - began)

  def _facts(
    self, key: str, made: SplitPlan, layout: RowLayout
  ) -> dict[str, Any]:
    """All that rows depend on: with other facts they are other rows."""
    reader, backbone = made.views.reader, self.backbone
    leaves = zip(layout.kept, layout.shapes, strict=True)
    return {
      "format": _FORMAT,
      "code": plan.code_digest(),
      "what": self.config.keep.what,
      "row": [[dtype.name, list(shape)] for dtype, shape in leaves],
      "backbone": backbone.fingerprint,
      "model": dataclasses.asdict(backbone.config),
      "data": {
        "name": reader.name,
        "split": reader.split,
        "size": reader.size,
        "classes": list(reader.class_names),
        "files": self._digest(key, reader),
      },
      "images": {"role": made.role, **made.facts},
      # The bits of a row depend on the program, which is one for each batch.
      "program": {
        "rows": made.starts.step,
        "process": [jax.process_index(), jax.process_count()],
        "mesh": dict(self.mesh.shape),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **image_ops.decoders(),
      },
    }

  def _digest(self, key: str, reader: Reader) -> Mapping[str, str]:
    """What tells the files of a split from others; all must call."""
    if key in self.record.inventories:
      return self.record.digests[key]
    by = self.config.data.digest
    table = processes.on_process_0(
      lambda: data_files.digest(reader.source.inventory.table(by))
    )
    return {"by": by, "sha256": table}

  def _folder(self) -> Path:
    """Where folders of shards are."""
    if self.config.keep.dir:
      return paths.local(self.config.keep.dir, "config.keep.dir")
    root = os.environ.get("MEMORY_VIT_CACHE") or "~/.cache/memory_vit"
    return paths.local(root, "MEMORY_VIT_CACHE") / "kept"

  @contextlib.contextmanager
  def _locked(self, path: Path) -> Iterator[None]:
    """Lock the folder of this process; all processes must call.

    Process 0 is first: of two runs, the one that has its folder gets those of
    all others, and no run waits for one that waits for it.
    """

    def enter() -> None:
      stack.enter_context(
        lock.one_at_a_time(path, self._wait, "config.keep.dir")
      )

    with contextlib.ExitStack() as stack:
      processes.on_process_0(enter)
      if jax.process_index() > 0:
        enter()
      yield

  def _wait(self, owner: str) -> None:
    """Wait a moment for another run, which is computing the same."""
    logger.info("waiting for %s, which is keeping the same", owner or "another")
    end = time.monotonic() + 5
    while time.monotonic() < end:
      if jax.process_count() == 1:  # else all would have to ask
        self.stop.check()
      time.sleep(0.2)


def _count(made: SplitPlan, spans: Sequence[range]) -> int:
  """The rows in some spans of the places of a plan."""
  return sum(len(range(made.count)[s.start : s.stop]) for s in spans)


def _require_known(reader: Reader) -> None:
  """Refuse data that nothing tells from others: a wrong row might be found."""
  known = reader.source.inventory
  if not known.files and known.facts.get("version") == "":
    raise ConfigError(
      f"config.keep.where is 'disk', but {reader.source} comes from Python "
      "without a version, so that later runs could not tell it from others: "
      "give it one, or expected 'host' or 'device'."
    )

"""Run a bulk job: plan it, make missing shards, and count errors."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow.compute as pc
import pyarrow.parquet as pq

from memory_vit.bulk import input_files, make_shards, shard_file
from memory_vit.bulk import plan as plans
from memory_vit.bulk.plan import Plan
from memory_vit.bulk.readers import Columns
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.runtime import lock, parquet, paths
from memory_vit.runtime.messages import brief
from memory_vit.runtime.progress_bar import ProgressBar

logger = logging.getLogger(__name__)


class Job(Protocol):
  """The work of a bulk run; it can be pickled."""

  @property
  def batch_size(self) -> int:
    """Number of images per pass."""

  def open(self) -> make_shards.Model:
    """Load the model."""


@dataclasses.dataclass(frozen=True)
class Summary:
  """Numbers of images and shards of an output."""

  images: int
  errors: int  # number of images that could not be read
  shards: int
  made: int  # number of shards that this run made


# A function that makes shards. Its arguments are the plan, the output folder,
# the job, the numbers of the missing shards, and a callback that receives the
# number of images just written.
Engine = Callable[[Plan, Path, Any, Sequence[int], Callable[[int], None]], None]


def run_bulk(
  job: Job,
  inputs: Sequence[str],
  output: str,
  *,
  columns: Columns = Columns(),  # noqa: B008 (it is frozen)
  shard_images: int = 4096,
  engine: Engine | None = None,
  say: Callable[[str], None] = logger.info,
) -> Summary:
  """Make one row for every image of the input, in shards of Parquet.

  Shards that an interrupted run has finished are not made again.

  Args:
    job: a `PredictionJob` or an `EmbeddingJob`.
    inputs: image files; Parquet (.parquet) and ArrayRecord (.array_record)
      files; folders, which stand for all images below them or, if there are
      no images, for the Parquet and ArrayRecord files below them.
    output: a directory for the shards.
    columns: the columns to read from Parquet files in the input.
    shard_images: number of images per shard.
    engine: function that makes the shards; by default, this process does.
    say: function that is called with each line of progress.

  Raises:
    ConfigError: if `output` holds other files or a different run, or another
      process is writing there.
    MemoryVitError: if the input or the model cannot be used.
  """
  folder = paths.local(output, "--output")
  columns = columns.absolute()
  inventory = input_files.take_inventory(inputs, columns, folder)
  model = job.open()
  plan = Plan(inventory, columns, shard_images, job.batch_size, model.facts)
  with _alone(folder):
    plans.settle(plan, folder)
    missing = _missing(plan, folder, say)
    total = sum(len(plan.numbers(i)) for i in missing)
    began = time.perf_counter()
    with ProgressBar(folder.name, total, say=say) as bar:
      if engine:
        engine(plan, folder, job, missing, bar.update)
      else:
        make_shards.make_shards(plan, folder, model, missing, bar.update)
    if missing:
      seconds = time.perf_counter() - began
      say(
        f"{total:,} images in {seconds:.1f} s, {total / seconds:.0f} images/s"
      )
    errors = _count_errors(plan, folder)
  return Summary(inventory.images, errors, plan.shards, len(missing))


def unreadable(output: str) -> Iterator[tuple[str, str]]:
  """Yield (path, reason) for each image that a bulk run could not read."""
  for file in sorted(paths.local(output, "--output").glob(parquet.SHARDS)):
    table = pq.read_table(
      file, columns=["path", "error"], filters=pc.field("error").is_valid()
    )
    for row in table.to_pylist():
      yield row["path"], row["error"]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
  """Hold the lock of `folder`; begin by removing remains of killed runs."""

  def refuse(owner: str) -> None:
    raise ConfigError(
      f"--output {brief(str(folder))}: {owner or 'another process'} is writing "
      "there. Wait for that process, end it, or give another --output."
    )

  plans.require_own(folder)
  # Never delete the lock file: a second process could then lock a new file.
  file = folder / plans.FOLDER / ".lock"
  with lock.one_at_a_time(file, refuse, "--output"):
    for part in folder.glob(".part-*.part"):  # left by a killed process
      part.unlink(missing_ok=True)
    for tries in (folder / plans.FOLDER).glob("part-*.tries"):
      tries.unlink(missing_ok=True)
    yield


def _missing(plan: Plan, folder: Path, say: Callable[[str], None]) -> list[int]:
  """Return the numbers of missing or damaged shards; pass messages to `say`."""
  missing = []
  for i in range(plan.shards):
    if shard_file.is_whole(folder, plan, i):
      continue
    missing.append(i)
    if (folder / plan.name(i)).exists():
      say(f"{folder / plan.name(i)} is damaged, and is made again")
  finished = plan.shards - len(missing)
  again = f", of which {finished} are finished" if finished else ""
  say(f"{plan.inventory.images:,} images, {plan.shards} shards{again}")
  return missing


def _count_errors(plan: Plan, folder: Path) -> int:
  """Return the number of rows with an error; raise if a shard is missing."""
  total = 0
  for i in range(plan.shards):
    errors = shard_file.errors_of(folder, plan, i)
    if errors is None:
      raise TrainingError(
        f"{folder / plan.name(i)} was made, but is missing or damaged. Check "
        "that all workers share this file system. If they do, give the same "
        "command again."
      )
    total += errors
  return total

"""Run a bulk job: plan, make what is missing, sum up."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from memory_vit.bulk import (
  input_files,
  make_shards,
  plan,
  shard_file,
  single_file,
)
from memory_vit.bulk.plan import Plan
from memory_vit.bulk.readers import Columns
from memory_vit.bulk.shard_file import ShardCounts
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.runtime import lock, paths
from memory_vit.runtime.messages import brief
from memory_vit.runtime.progress_bar import ProgressBar

logger = logging.getLogger(__name__)


class Job(Protocol):
  """What is done with every image; it can be pickled."""

  @property
  def batch_size(self) -> int:
    """Images of a pass."""

  def open(self, warm_up: bool = True) -> make_shards.Model:
    """Load the model."""


@dataclasses.dataclass(frozen=True)
class Input:
  """What is read.

  Attributes:
    paths: see `inventory.take_inventory`.
    columns: of Parquet files.
  """

  paths: tuple[str, ...]
  columns: Columns = Columns()


@dataclasses.dataclass(frozen=True)
class Summary:
  """What a run has made.

  Attributes:
    images: rows of the output, one for each image of the input.
    errors: rows of images that could not be read.
    shards: of the output.
    made: those of them that this run made; the others were there.
    seconds: that this run took.
  """

  images: int
  errors: int
  shards: int
  made: int
  seconds: float


# Makes shards of a plan somewhere, and says when each is there: (plan, folder,
# job, missing shards). A shard may be reported more than once.
Engine = Callable[
  [Plan, Path, Any, Sequence[int]], Iterable[make_shards.Finished]
]


def run_bulk(
  job: Job,
  source: Input,
  output: str,
  *,
  shard_images: int = 4096,
  engine: Engine | None = None,
  say: Callable[[str], None] = logger.info,
) -> Summary:
  """Make one row for every image of the input, in shards of Parquet.

  What a run that was interrupted has finished is not made again.

  Args:
    job: what is done with every image.
    source: the input.
    output: a directory for the shards; or a file NAME.parquet, for which they
      are joined at the end.
    shard_images: of each shard.
    engine: where shards are made; by default in this process.
    say: is called with lines that say how far it is.

  Raises:
    ConfigError: where the output holds something else, or another process is
      writing there.
    MemoryVitError: for inputs and models that cannot be used.
  """
  began = time.perf_counter()
  place = paths.local(output, "--output")
  folder = single_file.shard_folder(place)
  # Of a run that resumes, the output may lie below its input.
  outputs = (place, folder)
  columns = source.columns.absolute()
  found = input_files.take_inventory(source.paths, columns, outputs)
  model = job.open(warm_up=False)
  made = Plan(found, columns, shard_images, job.batch_size, model.facts)
  missing: list[int] = []
  with _alone(place, folder):
    counts = single_file.counts(place, made)
    if counts is None:
      plan.settle(made, folder)
      missing = _missing(made, folder, say)
      total = sum(len(made.numbers(i)) for i in missing)
      started = time.perf_counter()
      with ProgressBar(place.name, total, say=say) as bar:
        make = engine or (
          lambda p, f, _, m: make_shards.make_shards(p, f, model, m, bar.update)
        )
        _follow(make(made, folder, job, missing), bar)
      if missing:
        taken = time.perf_counter() - started
        say(f"{total:,} images in {taken:.1f} s, {total / taken:.0f} images/s")
      counts = _require_finished(made, folder)
      if single_file.is_one(place):
        single_file.join(folder, made, place)
    if single_file.is_one(place):
      single_file.remove_shards(folder, made)
  seconds = time.perf_counter() - began
  return Summary(
    counts.images, counts.errors, made.shards, len(missing), seconds
  )


def unreadable(output: str) -> Iterator[tuple[str, str]]:
  """Yield (path, reason) of the images of an output that could not be read."""
  place = paths.local(output, "--output")
  files = sorted(place.glob("part-*.parquet")) if place.is_dir() else [place]
  for file in files:
    if not shard_file.count_errors(pq.read_metadata(file)):
      continue
    table = pq.read_table(file, columns=["path", "error"])
    for row in table.filter(table["error"].is_valid()).to_pylist():
      yield row["path"], row["error"]


@contextlib.contextmanager
def _alone(output: Path, folder: Path) -> Iterator[None]:
  """Keep out other processes that would write the same output.

  Args:
    output: a directory or a file.
    folder: of its shards.
  """

  def refuse(owner: str) -> None:
    raise ConfigError(
      f"--output {brief(str(output))}: {owner or 'another process'} is writing "
      "there. Wait for it, end it, or give another --output."
    )

  # It is never deleted: another process could then hold a lock of this name.
  if single_file.is_one(output):
    file = single_file.lock_file(output)
    paths.make_directory(file.parent, "--output")
  else:
    plan.require_own(folder)
    file = folder / plan.FOLDER / ".lock"
  with lock.one_at_a_time(file, refuse, "--output"):
    for left in folder.glob(".part-*.part"):  # of a process that was killed
      left.unlink(missing_ok=True)
    for counted in (folder / plan.FOLDER).glob("part-*.tries"):
      counted.unlink(missing_ok=True)
    yield


def _missing(made: Plan, folder: Path, say: Callable[[str], None]) -> list[int]:
  """The shards that are not there, or are not whole."""
  missing = []
  for i in range(made.shards):
    if shard_file.undamaged(folder, made, i):
      continue
    missing.append(i)
    if (folder / made.name(i)).exists():
      say(f"{folder / made.name(i)} is damaged, and is made again")
  done = made.shards - len(missing)
  again = f", of which {done} are there" if done else ""
  say(f"{made.inventory.images:,} images, {made.shards} shards{again}")
  return missing


def _follow(finished: Iterable[make_shards.Finished], bar: ProgressBar) -> None:
  """Wait for shards; an engine may have counted their images before."""
  done: dict[int, int] = {}
  for shard in finished:
    done[shard.shard] = shard.counts.images
    bar.reach(max(bar.done, sum(done.values())))


def _require_finished(made: Plan, folder: Path) -> ShardCounts:
  """Count all rows; every image has exactly one."""
  images = errors = 0
  for i in range(made.shards):
    counts = shard_file.finished(folder, made, i)
    if counts is None:
      raise TrainingError(
        f"{folder / made.name(i)} is not there, or is damaged, though it was "
        "made: is this file system one that all workers share? Give the same "
        "command again."
      )
    images, errors = images + counts.images, errors + counts.errors
  return ShardCounts(images, errors)

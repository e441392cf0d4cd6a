"""Runs of a study: they are made, or were made before."""

import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from memory_vit.config import Config, DataConfig, to_dict
from memory_vit.data import datasets, inventory
from memory_vit.data.data_record import DataRecord
from memory_vit.data.inventory import Inventory
from memory_vit.errors import ConfigError, DataError, DivergedError
from memory_vit.run_result import (
  RESULT,
  RunResult,
  TrialResult,
  read_result,
)
from memory_vit.runtime import files, processes, schema
from memory_vit.runtime.preemption import StopSignal
from memory_vit.study.runs import Run
from memory_vit.study.selection import Point, best
from memory_vit.training import resume, run

logger = logging.getLogger("memory_vit")
# What a run leaves all of whose variants diverged.
_LOST = "lost.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
  """A run that is finished.

  Attributes:
    points: what it measured, one for every variant.
    seconds: that it took in all; of one that was killed, since it went on.
    data: the digests of what it was given, from `DataRecord.digests`; empty of
      one all of whose variants diverged, and of an earlier version.
  """

  points: list[Point]
  seconds: float
  data: Mapping[str, Mapping[str, str]]


def measure(
  config: Config,
  planned: Run,
  directory: Path,
  fingerprint: str,
  stop: StopSignal | None = None,
) -> list[Point]:
  """Trains a run, or goes on with it; a finished one is only read.

  A run all of whose variants diverge is finished as well: that is a finding,
  and is kept in `lost.json`.

  Args:
    config: of the run.
    planned: what it is.
    directory: its workdir.
    fingerprint: of the backbone.
    stop: see `run.train_and_evaluate`.

  Raises:
    ConfigError: where another configuration has finished the run there.
  """
  found = finished(config, planned, directory, fingerprint)
  if found:
    return found.points
  _require_unfinished(config, directory, fingerprint)
  logger.info("run %s", directory)
  began = time.perf_counter()
  try:
    result = run.train_and_evaluate(config, directory, stop)
  except DivergedError as error:
    logger.warning("%s", error)
    seconds = round(time.perf_counter() - began, 2)
    lost = {
      "backbone": {"fingerprint": fingerprint},
      "message": str(error),
      "wall_seconds": seconds,
    }
    files.write_json(directory / _LOST, lost)
    points = lost_points(planned)
  else:
    points = points_of(planned, result, directory)
  remove_checkpoints(directory)
  return points


def remove_checkpoints(directory: Path) -> None:
  """Removes the saved states of a run that is finished.

  With its two states, each with the best so far, a run of the regime `full`
  holds a backbone many times over; its result and its exported task stay.

  Args:
    directory: of the run.
  """
  states = directory / "checkpoints"
  if jax.process_index() == 0 and states.exists():
    shutil.rmtree(states)


def finished(
  config: Config, planned: Run, directory: Path, fingerprint: str
) -> Finished | None:
  """What a run of this configuration left; None where it is not finished.

  Args:
    config: of the run.
    planned: what it is.
    directory: its workdir.
    fingerprint: of the backbone.
  """
  result = _read_end(directory)
  if result is None or _differences(config, fingerprint, directory, result):
    return None
  return Finished(
    points=(
      points_of(planned, result, directory)
      if result.tasks
      else lost_points(planned)
    ),
    seconds=result.wall_seconds,
    data=result.data,
  )


def require_same_data(
  sets: Mapping[str, DataConfig],
  done: Mapping[str, Finished],
  runs: Path,
  *,
  trust_data_code: bool = False,
) -> None:
  """Refuses finished runs whose data are others now; all processes must call.

  Data that are not there any more are named in the log: what is finished does
  not need them.

  Args:
    sets: the data sets of the study, by their names.
    done: {name: what a finished run left}.
    runs: the directory of the runs.
    trust_data_code: as `config.trust_data_code`.

  Raises:
    ConfigError: with what differs.
  """
  other = processes.on_process_0(
    lambda: _other_data(sets, done, runs, trust_data_code)
  )
  if other:
    names, lines = other
    raise ConfigError(
      f"the data are not those of the finished runs {names}. Put those back, "
      "or give another --workdir.\n  " + "\n  ".join(lines)
    )


def _other_data(
  sets: Mapping[str, DataConfig],
  done: Mapping[str, Finished],
  runs: Path,
  trust_data_code: bool,
) -> tuple[list[str], list[str]] | None:
  """The runs whose data are others now, and what differs for the first."""

  @functools.cache
  def inventory_of(data_set: str, role: str) -> Inventory | None:
    where = sets[data_set]
    split = getattr(where, role)
    try:
      return datasets.take_inventory(
        where.name, split, where.dir, trust_data_code=trust_data_code
      )
    except DataError as error:
      logger.warning("whether data changed is not known: %s", error)
      return None

  @functools.cache
  def digest_now(data_set: str, role: str, by: str) -> str | None:
    found = inventory_of(data_set, role)
    return found and inventory.digest(found.table(by))

  names, lines = [], []
  for name, ended in done.items():
    of = ended.points[0].data
    for role in ("train", "validation", "test"):
      known = ended.data.get(role)
      now = known and digest_now(of, role, known["by"])
      if not now or now == known["sha256"]:
        continue
      names.append(name)
      if names[0] == name:
        record = DataRecord(
          directory=runs / name / "inventory",
          by=known["by"],
          inventories={role: inventory_of(of, role)},
        )
        first, *more = record.difference(role, known)
        lines += [f"{role}: {first}", *more]
  return (list(dict.fromkeys(names)), lines) if names else None


def read_by(
  planned: Run, points: Mapping[str, Sequence[Point]], cells: int
) -> list[str] | None:
  """Directories of the tasks that a run attends to.

  Args:
    planned: the run.
    points: {run: what it measured}, that of the run that it reads among them.
    cells: of the task that it reads.

  Returns:
    Of the run that it reads, what is best on validation; None where all of that
    diverged.
  """
  if planned.reads is None:
    return []
  found = best([p for p in points[planned.reads.name] if p.cells == cells])
  return found and [found.task]


def lost_points(planned: Run) -> list[Point]:
  """Points of a run all of whose variants diverged, or cannot be."""
  return [
    Point(
      run=planned.name,
      regime=planned.regime,
      data=planned.data,
      seed=planned.seed,
      reads=planned.reads is not None,
      learning_rate=rate,
      cells=cells,
    )
    for rate, cells in planned.variants
  ]


def points_of(planned: Run, result: RunResult, directory: Path) -> list[Point]:
  """A point for every variant of a finished run, also for what diverged.

  Args:
    planned: the run.
    result: of the run.
    directory: its workdir.
  """
  # Of a single run everything or nothing is lost. What was best before it
  # diverged is no result of that learning rate.
  lost = result.sweep.lost if result.sweep else {}
  entries = {
    (entry.learning_rate, entry.cells): entry
    for entry in result.tasks
    if entry.name not in lost
  }
  if (
    not {*entries} <= {*planned.variants}
    or len(entries) + len(lost) != len(planned.variants)
  ):  # fmt: skip
    raise ConfigError(
      f"{directory / RESULT} holds the variants {sorted(entries)} and "
      f"lost {sorted(lost)}: expected (learning rate, cells) "
      f"{planned.variants}. Move the run away to make it again."
    )
  return [
    _with_result(point, entries[point.learning_rate, point.cells], directory)
    if (point.learning_rate, point.cells) in entries
    else point
    for point in lost_points(planned)
  ]


def _with_result(point: Point, entry: TrialResult, directory: Path) -> Point:
  """A point, with what its trial measured."""
  return dataclasses.replace(
    point,
    validation=entry.val_accuracy,
    test=entry.test_accuracy,
    parameters=entry.trainable_params,
    task=str(directory / entry.exported),
    examples=entry.test_examples,
  )


def _read_end(directory: Path) -> RunResult | None:
  """Reads `lost.json` or `result.json`; None where a run is unfinished.

  A run all of whose variants diverged has a result without tasks.
  """
  return read_result(directory, _LOST) or read_result(directory)


def _require_unfinished(
  config: Config, directory: Path, fingerprint: str
) -> None:
  """Refuses to train over the result of another configuration."""
  result = _read_end(directory)
  if result is not None:
    raise ConfigError(
      f"the run in {directory} was finished with another configuration. Give "
      "that one, or another --workdir.\n  "
      + "\n  ".join(_differences(config, fingerprint, directory, result))
    )


def _differences(
  config: Config, fingerprint: str, directory: Path, result: RunResult
) -> list[str]:
  """What matters to a result, and differs from what made it."""
  made_by = files.read_object(directory / "config.json")
  found, now = (
    {**resume.what_matters(values), **_epochs(values), "backbone": mark}
    for values, mark in (
      (made_by, result.backbone.fingerprint),
      (to_dict(config), fingerprint),
    )
  )
  return schema.differences(found, now)


def _epochs(values: Mapping[str, Any]) -> dict[str, Any]:
  """How long a run is that is given in epochs.

  How many steps these are the run itself finds out, in its own data.
  """
  epochs = values.get("epochs")  # earlier versions had no such option
  return {"config.total_steps": f"{epochs} epochs"} if epochs else {}

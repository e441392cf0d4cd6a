"""What the runs of a study measured, and what is best on validation."""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memory_vit import records, resume, run
from memory_vit.config import Config, to_dict
from memory_vit.errors import ConfigError, DivergedError
from memory_vit.study import Run

logger = logging.getLogger("memory_vit")
# What a run leaves all of whose variants diverged.
_LOST = "lost.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """One task that was learned.

  Attributes:
    run: name of the run that learned it.
    regime: as in `study.Run`; so are data and seed.
    data: see there.
    seed: see there.
    reads: whether it attends to another task.
    learning_rate: its own.
    cells: its own, 0 in a regime without memory.
    validation: accuracy; None where it diverged.
    test: accuracy; None where it diverged, or was not tested.
    parameters: that were trained, its head among them.
    task: directory to which it was exported.
    examples: on which it was tested; None as `test`.
  """

  run: str
  regime: str
  data: str
  seed: int
  reads: bool
  learning_rate: float
  cells: int
  validation: float | None = None
  test: float | None = None
  parameters: int | None = None
  task: str | None = None
  examples: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A learning rate that was chosen on validation, with its test accuracies.

  Attributes:
    learning_rate: with the best validation accuracy of what it is chosen by; of
      equals the lowest.
    validation: mean of the accuracies that it was chosen by.
    tests: accuracy of every seed that did not diverge.
    diverged: seeds that did.
    parameters: that were trained.
  """

  learning_rate: float
  validation: float
  tests: tuple[float, ...]
  diverged: int
  parameters: int

  @property
  def test(self) -> float:
    """Mean over seeds."""
    return float(np.mean(self.tests))

  @property
  def spread(self) -> float | None:
    """Greatest less least test accuracy; of one seed there is none."""
    return max(self.tests) - min(self.tests) if len(self.tests) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
  """A run that is finished.

  Attributes:
    points: what it measured, one for every variant.
    seconds: that it took in all; of one that was killed, since it went on.
  """

  points: list[Point]
  seconds: float


def measure(
  config: Config, planned: Run, directory: Path, fingerprint: str
) -> list[Point]:
  """Trains a run, or goes on with it; a finished one is only read.

  A run all of whose variants diverge is finished as well: that is a finding,
  and is kept in `lost.json`.

  Args:
    config: of the run.
    planned: what it is.
    directory: its workdir.
    fingerprint: of the backbone.

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
    result = run.train_and_evaluate(config, directory)
  except DivergedError as error:
    logger.warning("%s", error)
    seconds = round(time.perf_counter() - began, 2)
    lost = {
      "backbone": {"fingerprint": fingerprint},
      "message": str(error),
      "wall_seconds": seconds,
    }
    records.write_json(directory / _LOST, lost)
    return lost_points(planned)
  return points_of(planned, result, directory)


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
  result = _end(directory)
  if result is None or _differences(config, fingerprint, directory, result):
    return None
  return Finished(
    points=(
      points_of(planned, result, directory)
      if "tasks" in result
      else lost_points(planned)
    ),
    seconds=result["wall_seconds"],
  )


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


def select(points: Sequence[Point], **values: Any) -> list[Point]:
  """The points with these values; those that read others only where asked."""
  values = {"reads": False, **values}
  return [
    point
    for point in points
    if all(getattr(point, key) == value for key, value in values.items())
  ]


def choose(points: Sequence[Point], seed: int | None = None) -> Choice | None:
  """Chooses a learning rate on validation.

  Args:
    points: of one regime, with one number of cells, on one data set; all have
      been tested.
    seed: whose validation alone counts; by default the mean over seeds does.

  Returns:
    The choice, with the test accuracies of all seeds. A rate at which a seed
    diverged whose validation counts is not chosen; None where all are such.
  """
  choices = []
  for rate in sorted({point.learning_rate for point in points}):
    seeds = [point for point in points if point.learning_rate == rate]
    counting = [p for p in seeds if seed is None or p.seed == seed]
    if any(point.validation is None for point in counting):
      continue
    well = [point for point in seeds if point.validation is not None]
    choices.append(
      Choice(
        learning_rate=rate,
        validation=float(np.mean([point.validation for point in counting])),
        tests=tuple(point.test for point in well),
        diverged=len(seeds) - len(well),
        parameters=well[0].parameters,
      )
    )
  return max(choices, key=lambda choice: choice.validation, default=None)


def best(points: Sequence[Point]) -> Point | None:
  """The one that is best on validation, of equals that of the lowest rate.

  None where all diverged.
  """
  well = [point for point in points if point.validation is not None]
  return max(
    well, key=lambda point: (point.validation, -point.learning_rate),
    default=None,
  )  # fmt: skip


def points_of(
  planned: Run, result: Mapping[str, Any], directory: Path
) -> list[Point]:
  """A point for every variant of a finished run, also for what diverged.

  Args:
    planned: the run.
    result: its `result.json`.
    directory: its workdir.
  """
  # Of a single run everything or nothing is lost. What was best before it
  # diverged is no result of that learning rate.
  lost = result["sweep"]["lost"] if "sweep" in result else {}
  entries = {
    (entry["learning_rate"], entry["cells"]): entry
    for entry in result["tasks"]
    if entry["name"] not in lost
  }
  if (
    not {*entries} <= {*planned.variants}
    or len(entries) + len(lost) != len(planned.variants)
  ):  # fmt: skip
    raise ConfigError(
      f"{directory / 'result.json'} holds the variants {sorted(entries)} and "
      f"lost {sorted(lost)}: expected (learning rate, cells) "
      f"{planned.variants}. Move the run away to make it again."
    )
  return [
    _with_result(point, entries[point.learning_rate, point.cells], directory)
    if (point.learning_rate, point.cells) in entries
    else point
    for point in lost_points(planned)
  ]


def _with_result(
  point: Point, entry: Mapping[str, Any], directory: Path
) -> Point:
  """A point, with the entry of `result.json` on it."""
  return dataclasses.replace(
    point,
    validation=entry["val_accuracy"],
    test=entry["test_accuracy"],
    parameters=entry["trainable_params"],
    task=str(directory / entry["exported"]),
    examples=entry["test_examples"],
  )


def _end(directory: Path) -> dict[str, Any] | None:
  """With what a run ended; None where it did not."""
  for name in (_LOST, "result.json"):
    if (directory / name).exists():
      return records.read_json(directory / name)
  return None


def _require_unfinished(
  config: Config, directory: Path, fingerprint: str
) -> None:
  """Refuses to train over the result of another configuration."""
  result = _end(directory)
  if result is not None:
    raise ConfigError(
      f"the run in {directory} was finished with another configuration. Give "
      "that one, or another --workdir.\n  "
      + "\n  ".join(_differences(config, fingerprint, directory, result))
    )


def _differences(
  config: Config, fingerprint: str, directory: Path, result: Mapping[str, Any]
) -> list[str]:
  """What matters to a result, and differs from what made it."""
  made_by = records.read_json(directory / "config.json")
  found, now = (
    {**resume.what_matters(values), "backbone": mark}
    for values, mark in (
      (made_by, result["backbone"]["fingerprint"]),
      (to_dict(config), fingerprint),
    )
  )
  return records.differences(found, now)

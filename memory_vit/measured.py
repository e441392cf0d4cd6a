"""What the runs of a study measured, and what is best on validation."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memory_vit import processes, records, run
from memory_vit.config import Config, to_dict
from memory_vit.errors import DivergedError
from memory_vit.study import Run

logger = logging.getLogger("memory_vit")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A learning rate that was chosen on validation, with its test accuracy.

  Attributes:
    learning_rate: with the best mean validation accuracy over seeds, of those
      with which no seed diverged.
    validation: that mean.
    test: mean over seeds.
    spread: of the test accuracies, greatest less least; 0 for one seed.
    parameters: that were trained.
  """

  learning_rate: float
  validation: float
  test: float
  spread: float
  parameters: int


def measure(config: Config, planned: Run, directory: Path) -> list[Point]:
  """Trains a run, or goes on with it; a finished one is only read.

  A run all of whose variants diverge is finished as well: that is a finding,
  and is kept in `lost.json`.

  Args:
    config: of the run.
    planned: what it is.
    directory: its workdir.
  """
  # What process 0 finds: the others might see what it has just written.
  result = processes.from_first(finished_result(config, directory))
  if result is None:
    logger.info("run %s", directory)
    try:
      result = run.train_and_evaluate(config, directory)
    except DivergedError as error:
      logger.warning("%s", error)
      result = {"tasks": []}
      lost = {"config": to_dict(config), "message": str(error)}
      records.write_json(directory / "lost.json", lost)
  return points_of(planned, result, directory)


def finished_result(config: Config, directory: Path) -> dict[str, Any] | None:
  """`result.json` of a finished run of this configuration, or None.

  Another configuration is left to the run itself: it knows what may change,
  and refuses the rest.
  """
  wanted = json.loads(json.dumps(to_dict(config)))
  lost = directory / "lost.json"
  if lost.exists() and records.read_json(lost)["config"] == wanted:
    return {"tasks": []}
  made, result = directory / "config.json", directory / "result.json"
  if made.exists() and result.exists() and records.read_json(made) == wanted:
    return records.read_json(result)
  return None


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
  """Points of a run that cannot be: nothing is left that it could read."""
  return points_of(planned, {"tasks": []}, Path())


def select(points: Sequence[Point], **values: Any) -> list[Point]:
  """The points with these values; those that read others only where asked."""
  values = {"reads": False, **values}
  return [
    point
    for point in points
    if all(getattr(point, key) == value for key, value in values.items())
  ]


def choose(points: Sequence[Point]) -> Choice | None:
  """Chooses a learning rate on validation; None where every one diverges.

  Args:
    points: of one regime, with one number of cells, on one data set; all have
      been tested.
  """
  choices = []
  for rate in sorted({point.learning_rate for point in points}):
    seeds = [point for point in points if point.learning_rate == rate]
    if any(point.validation is None for point in seeds):
      continue
    tests = [point.test for point in seeds]
    choices.append(
      Choice(
        learning_rate=rate,
        validation=float(np.mean([point.validation for point in seeds])),
        test=float(np.mean(tests)),
        spread=max(tests) - min(tests),
        parameters=seeds[0].parameters,
      )
    )
  return max(choices, key=lambda choice: choice.validation, default=None)


def best(points: Sequence[Point]) -> Point | None:
  """The one that is best on validation; None where all diverged."""
  well = [point for point in points if point.validation is not None]
  return max(well, key=lambda point: point.validation, default=None)


def points_of(
  planned: Run, result: Mapping[str, Any], directory: Path
) -> list[Point]:
  """A point for every variant of a finished run, also for what diverged.

  Args:
    planned: the run.
    result: its `result.json`.
    directory: its workdir.
  """
  lost = result.get("sweep", {}).get("lost", {})
  entries = {
    (entry["learning_rate"], entry["cells"]): entry
    for entry in result["tasks"]
    # What was best before it diverged is no result of that learning rate.
    if entry["name"] not in lost
  }
  points = []
  for rate, cells in planned.variants:
    point = Point(
      run=planned.name,
      regime=planned.regime,
      data=planned.data,
      seed=planned.seed,
      reads=planned.reads is not None,
      learning_rate=rate,
      cells=cells,
    )
    entry = entries.get((rate, cells))
    if entry:
      point = dataclasses.replace(
        point,
        validation=entry["val_accuracy"],
        test=entry["test_accuracy"],
        parameters=entry["trainable_params"],
        task=str(directory / entry["exported"]),
      )
    points.append(point)
  return points

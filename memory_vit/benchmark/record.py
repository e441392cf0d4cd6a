"""Files from which the report of a benchmark is made.

vtab.json: command, hardware, configuration, what is missing, and of every task
and regime that is finished what was chosen and how good it is; together.json:
all tasks in one model. runs/TASK/REGIME/search and .../seed-0, seed-1, ... are
what `memory-vit train` leaves; test.json in these is what the test split says.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory_vit.errors import ConfigError
from memory_vit.runtime import files, schema

RECORD, TOGETHER = "vtab.json", "together.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """Accuracy of a regime on a task.

  Attributes:
    task: name in the benchmark.
    regime: by which it was learned.
    settings: that were chosen, {"learning_rate": 0.001}.
    validation: accuracy on the 200; None where every setting diverged.
    at_edge: settings that are the least or the greatest tried.
    tried: settings that were tried.
    diverged: how many of these did.
    tests: accuracy of every seed on the test split; those that diverged are
      missing.
    seeds: how many there were.
    trials: tasks that were learned, in search and final runs.
    test_examples: how many images were tested.
    skipped: how many could not be read.
    parameters: trained values of one task, the head among them.
    passes: over the images, as `SweepResult.passes`: of the search, and of each
      final run.
    training_seconds: of all runs.
    wall_seconds: of all runs, with everything, and of their tests.
  """

  task: str
  regime: str
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  validation: float | None = None
  at_edge: tuple[str, ...] = ()
  tried: int = 0
  diverged: int = 0
  tests: tuple[float, ...] = ()
  seeds: int = 0
  trials: int = 0
  test_examples: int = 0
  skipped: int = 0
  parameters: int = 0
  passes: tuple[int, ...] = ()
  training_seconds: float = 0.0
  wall_seconds: float = 0.0

  @property
  def test(self) -> float | None:
    """Mean over seeds; None where one of them diverged."""
    if not self.tests or len(self.tests) < self.seeds:
      return None
    return sum(self.tests) / len(self.tests)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkRecord:
  """Content of `vtab.json`.

  Attributes:
    command: that measured last.
    hardware: on which it did.
    config: as `config.to_dict`, with what the backbone settled.
    backbone: its fingerprint and variant.
    regimes: of the table, in order.
    missing: {task: why it has no data}.
    left_out: tasks that --only left out.
    scores: of what is finished.
  """

  command: str
  hardware: str
  config: dict[str, Any]
  backbone: dict[str, Any]
  regimes: tuple[str, ...]
  missing: dict[str, Any]
  left_out: tuple[str, ...]
  scores: tuple[dict[str, Any], ...] = ()

  def found(self) -> dict[tuple[str, str], Score]:
    """{(task, regime): its score}.

    Raises:
      ConfigError: for scores of another form.
    """
    found = {}
    for values in self.scores:
      score = schema.build(Score, values, f"{RECORD}: scores", ConfigError)
      found[score.task, score.regime] = score
    return found


def search_directory(workdir: Path, task: str, regime: str) -> Path:
  """Where the search of a task is."""
  return workdir / "runs" / task / regime / "search"


def final_directory(workdir: Path, task: str, regime: str, seed: int) -> Path:
  """Where the final run of a seed is."""
  return workdir / "runs" / task / regime / f"seed-{seed}"


def tested_directory(workdir: Path, task: str) -> Path:
  """Where the tables of the files of a test split are, in inventory/."""
  return workdir / "runs" / task


def task_directory(workdir: Path, task: str, regime: str) -> Path:
  """Where a task is kept, of the first seed."""
  return workdir / "tasks" / regime / task


def read_record(workdir: Path) -> BenchmarkRecord:
  """Read `vtab.json`.

  Raises:
    ConfigError: where it is not there, or not of this version.
  """
  values = files.read_object(workdir / RECORD)
  return schema.build(BenchmarkRecord, values, RECORD, ConfigError)


def write_record(workdir: Path, record: BenchmarkRecord) -> None:
  """Write `vtab.json`, by one process."""
  files.write_json(workdir / RECORD, dataclasses.asdict(record))


def read_together(workdir: Path) -> Mapping[str, Any] | None:
  """Read `together.json`; None where nothing was measured."""
  file = workdir / TOGETHER
  return files.read_object(file, "what", "found") if file.exists() else None

"""The files from which the report of a study is made: written, read, compared.

study.json: configuration, backbone, hardware, names of finished runs;
runs/NAME: what `memory-vit train` leaves, see `trials`; costs.json: operations
as compiled; interference.json: accuracies of tasks side by side.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from memory_vit.config import Config
from memory_vit.errors import ConfigError
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import files, schema
from memory_vit.study import plan
from memory_vit.study.runs import Run, possible_parts
from memory_vit.study.selection import best_parent
from memory_vit.study.trials import (
  StudyTrial,
  Trials,
  directory_of,
  diverged_trials,
  load_ending,
  trials_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyRecord:
  """Content of `study.json`."""

  command: str  # that measured last
  hardware: str  # on which it did
  config: Config  # with the size of the images
  backbone: ViTConfig
  runs: tuple[str, ...] = ()  # names of those that this configuration finished


def read_record(workdir: Path) -> StudyRecord:
  """Read `study.json`.

  Raises:
    ConfigError: where it is not there, or not of this version.
  """
  values = files.read_object(workdir / "study.json")
  return schema.build(StudyRecord, values, "study.json", ConfigError)


def write_record(workdir: Path, record: StudyRecord) -> None:
  """Write `study.json`, by one process."""
  files.write_json(workdir / "study.json", dataclasses.asdict(record))


def read_trials(record: StudyRecord, workdir: Path) -> Trials:
  """Read the results of all finished runs."""

  def find(run: Run, known: Trials) -> list[StudyTrial] | None:
    if run.name not in record.runs:
      return None
    directory = directory_of(workdir, run.name)
    if ending := load_ending(directory):
      return trials_of(run, ending, directory)
    if run.reads and not best_parent(
      run.reads, known, record.config.task.cells
    ):
      return diverged_trials(run)  # it was never trained
    raise ConfigError(
      f"{directory} has no result any more. Put it back, or give the command "
      "of the study without --report_only."
    )

  parts = possible_parts(record.config)
  return plan.finished_trials(record.config, parts, find)


def read_measured(file: Path, key: Any) -> Any:
  """Read what `write_measured` wrote for the same key; else None."""
  if not file.exists():
    return None
  known = files.read_object(file, "what", "found")
  same = known["what"] == json.loads(json.dumps(key))
  return known["found"] if same else None


def write_measured(file: Path, key: Any, found: Any) -> None:
  """Write a measurement with its key, by one process."""
  files.write_json(file, {"what": key, "found": found})

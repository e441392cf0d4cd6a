"""The files from which the report of a study is made: written, read, compared.

study.json: configuration, backbone, hardware, names of finished runs;
runs/NAME: what `memory_vit.main` leaves, see `trials`; costs.json: operations
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
  """Content of `study.json`.

  Attributes:
    command: that measured last.
    hardware: on which it did.
    config: of the study, with the size of the images.
    backbone: shapes of the backbone.
    runs: names of the runs that this configuration has finished.
  """

  command: str
  hardware: str
  config: Config
  backbone: ViTConfig
  runs: tuple[str, ...] = ()


def read_record(workdir: Path) -> StudyRecord:
  """Reads `study.json`.

  Raises:
    ConfigError: where it is not there, or not of this version.
  """
  values = files.read_json(workdir / "study.json")
  return schema.build(StudyRecord, values, "study.json", ConfigError)


def write_record(workdir: Path, record: StudyRecord) -> None:
  """Writes `study.json`, by one process."""
  files.write_json(workdir / "study.json", dataclasses.asdict(record))


def read_trials(record: StudyRecord, workdir: Path) -> Trials:
  """Reads the results of all finished runs."""
  found: dict[str, list[StudyTrial]] = {}
  parts = possible_parts(record.config)
  # What is finished says at which rate further seeds were run.
  while new := [
    run
    for run in plan.plan(record.config, parts, found)
    if run.name in record.runs and run.name not in found
  ]:
    for run in new:
      found[run.name] = _read_run(record, run, found, workdir)
  return found


def _read_run(
  record: StudyRecord, run: Run, known: Trials, workdir: Path
) -> list[StudyTrial]:
  """Reads the results of a run; those that it reads are known."""
  directory = directory_of(workdir, run.name)
  ending = load_ending(directory)
  if ending is not None:
    return trials_of(run, ending, directory)
  if run.reads and not best_parent(run.reads, known, record.config.task.cells):
    return diverged_trials(run)  # it was never trained
  raise ConfigError(
    f"{directory} has no result any more. Put it back, or give the command of "
    "the study without --report_only."
  )


def read_measured(file: Path, key: Any) -> Any:
  """Reads what was measured for `key`; None where that was never measured.

  Args:
    file: that `write_measured` wrote.
    key: what JSON can hold; what was measured for another one does not count.
  """
  if not file.exists():
    return None
  known = files.read_object(file, "what", "found")
  same = known["what"] == json.loads(json.dumps(key))
  return known["found"] if same else None


def write_measured(file: Path, key: Any, found: Any) -> None:
  """Writes a measurement with its key, by one process."""
  files.write_json(file, {"what": key, "found": found})

"""Read and write the files from which a report is made, without jax.

WORKDIR/record.json holds the command, the configuration and the names of the
finished runs; WORKDIR/runs/NAME is the work directory of a run without its
checkpoints; further files hold measurements.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import memory_vit as mv
from memory_vit.config import from_dict

RECORD = "record.json"
# The result of a run all of whose trials diverged; it has no tasks.
DIVERGED = "lost.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """Content of `record.json`.

  Attributes:
    command: the last one.
    hardware: of the last command.
    config: for the runs, with the options that the backbone determines.
    backbone: its architecture.
    fingerprint: of its weights.
    options: of the study itself.
    runs: names of the runs that were finished with this configuration.
  """

  command: str
  hardware: str
  config: mv.Config
  backbone: mv.ViTConfig
  fingerprint: str
  options: Mapping[str, Any]
  runs: Sequence[str] = ()

  def write(self, workdir: Path) -> None:
    """Write `record.json`.

    Raises:
      MemoryVitError: if it cannot be written.
    """
    write_json(workdir / RECORD, dataclasses.asdict(self))


def read_record(workdir: Path) -> Record:
  """Read `record.json`.

  Raises:
    MemoryVitError: if it is missing or of another version.
  """
  values = read_json(workdir / RECORD)
  try:
    values["config"] = from_dict(values["config"])
    values["backbone"] = mv.ViTConfig(**values["backbone"])
    return Record(**values)
  except (KeyError, TypeError) as error:
    raise mv.MemoryVitError(
      f"{workdir / RECORD} is of another version ({error}): run the study "
      "again."
    ) from error


def directory_of(workdir: Path, name: str) -> Path:
  """The work directory of a run."""
  return workdir / "runs" / name


def load_run_result(workdir: Path, name: str) -> mv.RunResult | None:
  """The result of a run; None if it has not finished.

  If all trials diverged, the result has no tasks.

  Raises:
    MemoryVitError: for a damaged file.
  """
  directory = directory_of(workdir, name)
  return mv.load_result(directory, DIVERGED) or mv.load_result(directory)


def read_results(record: Record, workdir: Path) -> dict[str, mv.RunResult]:
  """Read the results of all finished runs.

  Raises:
    MemoryVitError: if one is missing.
  """
  found = {}
  for name in record.runs:
    result = load_run_result(workdir, name)
    if result is None:
      raise mv.MemoryVitError(
        f"{directory_of(workdir, name)} has lost its result. Restore it, or "
        "run the study again."
      )
    found[name] = result
  return found


def read_measured(file: Path, key: Any) -> Any:
  """Read measurements; None if there are none of this key.

  Raises:
    MemoryVitError: for a damaged file.
  """
  if not file.exists():
    return None
  known = read_json(file)
  same = known["what"] == json.loads(json.dumps(key))
  return known["found"] if same else None


def read_json(file: Path) -> Any:
  """Read a JSON object.

  Raises:
    MemoryVitError: if the file is missing or holds something else.
  """
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise mv.MemoryVitError(f"{file} is not readable ({error}).") from error
  if not isinstance(values, dict):
    raise mv.MemoryVitError(f"{file} does not hold an object of JSON.")
  return values


def write_json(file: Path, values: Any) -> None:
  """Write JSON atomically, by one process."""
  write_text(file, json.dumps(values, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
  """Write a text atomically, by one process.

  Raises:
    MemoryVitError: if it cannot be written.
  """
  part = file.with_name(f"{file.name}.tmp")
  try:
    part.write_text(text, encoding="utf-8")
    part.replace(file)
  except OSError as error:
    raise mv.MemoryVitError(
      f"{file} cannot be written ({error}): make room, and give the same "
      "command again."
    ) from error


def write_report(workdir: Path, numbers: Any, lines: Sequence[str]) -> None:
  """Write report.json and report.md, by one process."""
  write_json(workdir / "report.json", numbers)
  write_text(workdir / "report.md", "\n".join(lines) + "\n")


def title_of(record: Record, title: str) -> list[str]:
  """The first lines of a report: title, command, hardware."""
  fence = "```"
  return [
    f"# {title}", "", fence, record.command, fence, "", record.hardware, "",
  ]  # fmt: skip


def section_of(
  title: str,
  tables: Sequence[Sequence[Mapping[str, str]]],
  notes: Sequence[str] = (),
) -> list[str]:
  """The lines of a heading, of tables that have rows, and of notes."""
  shown = [markdown_table(rows) for rows in tables if rows]
  blocks = [f"## {title}", *shown, *notes]
  return [line for block in blocks for line in ("", block)]


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
  """Format rows with the same keys, which become the header."""
  header = list(rows[0])
  lines = [header, ["---"] * len(header)]
  lines += [[row[key] for key in header] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""The files from which a report is made: read and written without jax.

WORKDIR/record.json says by which command, on what and with which configuration
the list was run, and which runs have finished; WORKDIR/runs/NAME is what
`mv.train_and_evaluate` leaves, less its saved states; further files hold what
was measured beside.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import memory_vit as mv
from memory_vit.config import from_dict

RECORD = "record.json"
# What a run leaves all of whose trials diverged: a result without tasks.
DIVERGED = "lost.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """Content of `record.json`.

  Attributes:
    command: that ran last.
    hardware: on which it did.
    config: for the runs, with what the backbone settles.
    backbone: its architecture.
    fingerprint: of its weights.
    options: of the study itself.
    runs: names of those that this configuration has finished.
  """

  command: str
  hardware: str
  config: mv.Config
  backbone: mv.ViTConfig
  fingerprint: str
  options: Mapping[str, Any]
  runs: Sequence[str] = ()

  def write(self, workdir: Path) -> None:
    """Write `record.json`."""
    write_json(workdir / RECORD, dataclasses.asdict(self))


def read_record(workdir: Path) -> Record:
  """Read `record.json`.

  Raises:
    MemoryVitError: where it is not there, or not of this version.
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


def load_ending(workdir: Path, name: str) -> mv.RunResult | None:
  """Read how a run ended; None of one that has not finished.

  Where all trials diverged, that is a result without tasks.
  """
  directory = directory_of(workdir, name)
  return mv.load_result(directory, DIVERGED) or mv.load_result(directory)


def read_results(record: Record, workdir: Path) -> dict[str, mv.RunResult]:
  """Read the results of all finished runs.

  Raises:
    MemoryVitError: where one is gone.
  """
  found = {}
  for name in record.runs:
    ending = load_ending(workdir, name)
    if ending is None:
      raise mv.MemoryVitError(
        f"{directory_of(workdir, name)} has no result any more. Put it back, "
        "or run the study again."
      )
    found[name] = ending
  return found


def read_measured(file: Path, key: Any) -> Any:
  """Read what was measured into a file; None if it was for another key."""
  if not file.exists():
    return None
  known = read_json(file)
  same = known["what"] == json.loads(json.dumps(key))
  return known["found"] if same else None


def read_json(file: Path) -> Any:
  """Read a JSON object.

  Raises:
    MemoryVitError: where there is none.
  """
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise mv.MemoryVitError(f"{file} is not readable ({error}).") from error
  if not isinstance(values, dict):
    raise mv.MemoryVitError(f"{file} does not hold an object of JSON.")
  return values


def write_json(file: Path, values: Any) -> None:
  """Write JSON, by one process; the file is whole or not there."""
  write_text(file, json.dumps(values, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
  """Write a text, by one process; the file is whole or not there."""
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
  """The first lines of a report: its title, the command, the hardware."""
  fence = "```"
  return [
    f"# {title}", "", fence, record.command, fence, "", record.hardware, "",
  ]  # fmt: skip


def section_of(
  title: str,
  tables: Sequence[Sequence[Mapping[str, str]]],
  notes: Sequence[str] = (),
) -> list[str]:
  """A heading, the tables that have rows, and notes, as lines."""
  shown = [markdown_table(rows) for rows in tables if rows]
  blocks = [f"## {title}", *shown, *notes]
  return [line for block in blocks for line in ("", block)]


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
  """Rows with the same keys as a table."""
  header = list(rows[0])
  lines = [header, ["---"] * len(header)]
  lines += [[row[key] for key in header] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)

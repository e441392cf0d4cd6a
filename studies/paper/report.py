"""Report of a study: a pure function of its directory, made without jax."""

import dataclasses
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit import plots
from memory_vit.config import OPTIONS, Config, to_dict
from memory_vit.runtime import files
from studies.paper import (
  analysis,
  costs,
  interference,
  plan,
  regime_table,
)
from studies.paper.record import (
  StudyRecord,
  read_measured,
  read_record,
  read_trials,
)
from studies.paper.runs import possible_parts
from studies.paper.section import Row, Section
from studies.paper.trials import StudyTrial, Trials

# Columns that hold a share, shown in per cent; and in points, with a sign.
_SHARES = ("validation", "test", "lowest test", "highest test", "paper",
           "no mask", "masked", "paper, no mask",
           "paper, i-Naturalist")  # fmt: skip
_DIFFERENCES = ("difference", "difference, no mask", "difference, masked")
_ERRORS = ("spread", "standard error", "error over images",
           "error over seeds")  # fmt: skip
_SECTIONS = {
  "table2": analysis.table2,
  "sensitivity": analysis.sensitivity,
  "cells": analysis.cells,
  "placement": analysis.placement,
  "extension": analysis.extension,
}
_COLUMNS = (
  "`test` is the mean over seeds on the test split, at the learning rate that "
  "is best on the validation split; `validation` is what it was `chosen by`: "
  "one seed alone, at whose best rate further seeds are run, or the mean over "
  "seeds, none of which may diverge. `end of range`: the chosen rate is the "
  "lowest or the highest that was tried, and a better one may lie beyond. "
  "`spread` is the greatest less the least of the seeds (none for one), and of "
  "a comparison the larger of both. `standard error`: of a test split of so "
  "many images as a sample of all, which further seeds do not lessen. These "
  "and differences are in points; a difference is `beyond spread` where it "
  "exceeds both spreads."
)


def write_report(workdir: Path) -> None:
  """Write report.md, report.json and plots, from the files of a study.

  Raises:
    ConfigError: where these are missing or damaged.
    TrainingError: where the report cannot be written.
  """
  record = read_record(workdir)
  trials = read_trials(record, workdir)
  found = sections(record, trials, workdir)
  shown = plan.plan(record.config, list(found), trials)
  numbers = {
    "command": record.command,
    "hardware": record.hardware,
    "config": to_dict(record.config),
    "parts": {part: dataclasses.asdict(s) for part, s in found.items()},
    "points": [
      dataclasses.asdict(trial) for run in shown for trial in trials[run.name]
    ],
  }
  for part, section in found.items():
    if section.lines:
      _plot(workdir / f"{part}.png", section)
  _write(workdir / "report.json", json.dumps(numbers, indent=2) + "\n")
  _write(workdir / "report.md", markdown(record, found))


def sections(
  record: StudyRecord, trials: Trials, workdir: Path
) -> dict[str, Section]:
  """Sections of all parts for which everything has been measured."""
  found = {}
  for part in possible_parts(record.config):
    runs = plan.runs_of(record.config, part, trials)
    if all(run.name in trials for run in runs):
      mine = [trial for run in runs for trial in trials[run.name]]
      if section := _section(record, part, mine, workdir):
        found[part] = section
  return found


def markdown(record: StudyRecord, found: Mapping[str, Section]) -> str:
  """The report for people."""
  lines = [
    f"# The paper's study on {record.config.data.name}",
    "",
    "```",
    record.command,
    "```",
    "",
    record.hardware,
    "",
    "What differs from the defaults of `memory_vit/config.py`:",
    "",
    *(f"- `{key} = {value!r}`" for key, value in _changed(record.config)),
    "",
    _COLUMNS,
  ]
  for part, section in found.items():
    lines += ["", f"## {section.title}"]
    for rows in (section.rows, section.comparisons):
      lines += ["", markdown_table(rows)] if rows else []
    lines += [text for note in section.notes for text in ("", note)]
    if section.lines:
      lines += ["", f"![{section.title}]({part}.png)"]
  return "\n".join(lines) + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
  """Rows with the same keys as a table."""
  header = list(rows[0])
  lines = [header, ["---"] * len(header)]
  lines += [[shown(key, row[key]) for key in header] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(key: str, value: Any) -> str:
  """Format a value of a column."""
  if value is None:
    return ""
  if isinstance(value, bool):
    return "yes" if value else "no"
  if key in _SHARES:
    return f"{100 * value:.1f} %"
  if key in _DIFFERENCES:  # in points; -0.0 is shown as 0.0
    return f"{100 * value:+.1f}" if abs(value) >= 0.0005 else "0.0"
  if key in _ERRORS:
    return f"{100 * value:.1f}"
  if isinstance(value, int):
    return f"{value:,}"
  if key == "learning rate":
    return str(value)
  if isinstance(value, float):
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.3f}"
  return str(value)


def _section(
  record: StudyRecord, part: str, trials: Sequence[StudyTrial], workdir: Path
) -> Section | None:
  """Section of a part whose runs are finished; None if it lacks more."""
  config = record.config
  if part == "costs":
    key = costs.key(record)
    found = read_measured(workdir / "costs.json", key)
    return costs.section(record.backbone, found) if found else None
  if part == "interference":
    tasks = interference.best_tasks(config, trials)
    if not tasks:
      return interference.section(config, (), ())
    key = interference.key(config, tasks)
    found = read_measured(workdir / "interference.json", key)
    return interference.section(config, **found) if found else None
  if part == "adapters":
    return analysis.adapters(config, trials, record.backbone)
  if part == "regimes":
    return regime_table.section(config, trials, workdir, record.backbone)
  return _SECTIONS[part](config, trials)


def _plot(file: Path, section: Section) -> None:
  """Write the plot of a section."""
  figure = plots.lines_figure(
    section.lines,
    title=section.title,
    xlabel=section.xlabel,
    ylabel="accuracy (test)",
    log=section.log,
  )
  with files.writing(file), files.replacing(file) as part:
    figure.savefig(part, dpi=120, format="png")


def _write(file: Path, text: str) -> None:
  """Write a file that is whole or not there; needs no process 0."""
  with files.writing(file), files.replacing(file) as part:
    part.write_text(text, encoding="utf-8")


def _changed(config: Config) -> Iterator[tuple[str, Any]]:
  """Options that are not at their defaults."""
  for key, option in OPTIONS.items():
    value = operator.attrgetter(key)(config)
    if value != option.default:
      yield f"config.{key}", value

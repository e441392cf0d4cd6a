"""Make the report of a study from its directory alone, without jax."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit import plots
from memory_vit.config import OPTIONS, to_dict
from studies import record as files
from studies.paper import analysis, costs, interference, plan, regime_table
from studies.paper.section import Row, Section
from studies.paper.study import Study
from studies.paper.trials import StudyTrial, Trials
from studies.record import (
  Record,
  read_measured,
  read_record,
  read_results,
)

# Columns of shares, in per cent; of differences and errors, in points.
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
  "is best on the validation split. `validation` is the accuracy by which it "
  "was chosen; `chosen by` says whether one seed chose it, and further seeds "
  "used its choice, or the mean over seeds, none of which may diverge. `end of "
  "range`: the chosen learning rate is the lowest or the highest that was "
  "tried, and a better one may lie beyond. `spread` is the difference between "
  "the highest and the lowest accuracy of the seeds (none for one seed); in a "
  "comparison, the larger of both spreads. `standard error` is that of the "
  "finite test split, which further seeds do not reduce. Spreads, errors and "
  "differences are in points; a difference is `beyond spread` if it exceeds "
  "both spreads."
)


@dataclasses.dataclass(frozen=True)
class Content:
  """The input of a report, read from its directory."""

  record: Record
  study: Study
  trials: Trials
  workdir: Path


def read_content(workdir: Path) -> Content:
  """Read the files of a study."""
  record = read_record(workdir)
  study = Study.of(record.config, record.options)
  results = read_results(record, workdir)
  trials = plan.known_trials(study, study.parts(), results, workdir)
  return Content(record, study, trials, workdir)


def write_report(workdir: Path) -> None:
  """Write report.md, report.json and plots."""
  content = read_content(workdir)
  study, trials, found = content.study, content.trials, sections(content)
  planned = plan.plan(study, list(found), trials)
  numbers = {
    "command": content.record.command,
    "hardware": content.record.hardware,
    "config": {**to_dict(study.config), "study": study.options},
    "parts": {part: dataclasses.asdict(s) for part, s in found.items()},
    "points": [
      dataclasses.asdict(trial) for run in planned for trial in trials[run.name]
    ],
  }
  for part, section in found.items():
    if section.lines:
      _plot(workdir / f"{part}.png", section)
  files.write_report(workdir, numbers, markdown(content, found))


def sections(content: Content) -> dict[str, Section]:
  """Sections of all parts that are completely measured."""
  study, trials, found = content.study, content.trials, {}
  for part in study.parts():
    runs = plan.runs_of(study, part, trials)
    if all(run.name in trials for run in runs):
      mine = [trial for run in runs for trial in trials[run.name]]
      if section := _section(content, part, mine):
        found[part] = section
  return found


def markdown(content: Content, found: Mapping[str, Section]) -> list[str]:
  """The lines of report.md."""
  title = f"The paper's study on {content.study.data.name}"
  lines = [
    *files.title_of(content.record, title),
    "What differs from the defaults of `memory_vit/config.py`:",
    "",
    *(f"- `{key} = {value!r}`" for key, value in _changed(content.study)),
    "",
    _COLUMNS,
  ]
  for part, section in found.items():
    tables = [formatted(section.rows), formatted(section.comparisons)]
    lines += files.section_of(section.title, tables, section.notes)
    if section.lines:
      lines += ["", f"![{section.title}]({part}.png)"]
  return lines


def formatted(rows: Sequence[Row]) -> list[dict[str, str]]:
  """Rows of text, each value in the format of its column."""
  return [{key: shown(key, value) for key, value in r.items()} for r in rows]


def shown(key: str, value: Any) -> str:
  """Format a value of a column."""
  if value is None:
    return ""
  if isinstance(value, bool):
    return "yes" if value else "no"
  if key in _SHARES:
    return f"{100 * value:.1f} %"
  if key in _DIFFERENCES:  # -0.0 is shown as 0.0
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
  content: Content, part: str, trials: Sequence[StudyTrial]
) -> Section | None:
  """The section of a part; None if a measurement is missing."""
  study, workdir = content.study, content.workdir
  vit = content.record.backbone
  if part == "costs":
    key = costs.key(study, vit, content.record.hardware)
    found = read_measured(workdir / "costs.json", key)
    return costs.section(vit, found) if found else None
  if part == "interference":
    tasks = interference.best_tasks(study, trials)
    if not tasks:
      return interference.section(study, (), ())
    key = interference.key(study, tasks)
    found = read_measured(workdir / "interference.json", key)
    return interference.section(study, **found) if found else None
  if part == "adapters":
    return analysis.adapters(study, trials, vit)
  if part == "regimes":
    return regime_table.section(study, trials, workdir, vit)
  return _SECTIONS[part](study, trials)


def _plot(file: Path, section: Section) -> None:
  figure = plots.lines_figure(
    section.lines,
    title=section.title,
    xlabel=section.xlabel,
    ylabel="accuracy (test)",
    log=section.log,
  )
  figure.savefig(file, dpi=120, format="png")


def _changed(study: Study) -> Iterator[tuple[str, Any]]:
  """Options that are not at their defaults."""
  for key, option in OPTIONS.items():
    value = operator.attrgetter(key)(study.config)
    if value != option.default:
      yield f"config.{key}", value
  for field in dataclasses.fields(study):
    value = getattr(study, field.name)
    if field.name != "config" and value != field.default:
      yield f"study.{field.name}", value

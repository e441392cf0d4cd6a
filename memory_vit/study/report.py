"""The report of a study: markdown with tables and plots, and all numbers."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from memory_vit import plots
from memory_vit.config import Config, to_dict
from memory_vit.model import trees
from memory_vit.runtime import files
from memory_vit.study.analysis import Finding, Row
from memory_vit.study.selection import Point

# Columns that hold a share, shown in per cent.
_SHARES = ("validation", "test", "paper", "no mask", "masked",
           "paper, no mask", "paper, i-Naturalist")  # fmt: skip


def write(
  directory: Path,
  config: Config,
  findings: Mapping[str, Finding],
  points: Sequence[Point],
) -> None:
  """Writes report.md and report.json.

  Args:
    directory: of the study.
    config: of the study.
    findings: {part: what it found}.
    points: all that was measured.
  """
  numbers = {
    "command": command(),
    "hardware": hardware(),
    "config": to_dict(config),
    "parts": {p: dataclasses.asdict(found) for p, found in findings.items()},
    "points": [dataclasses.asdict(point) for point in points],
  }
  files.write_json(directory / "report.json", numbers)
  files.write_text(directory / "report.md", markdown(config, findings))


def plot(directory: Path, part: str, found: Finding) -> None:
  """Writes PART.png, where a part has something to plot, by one process."""
  if not found.lines or jax.process_index() != 0:
    return
  figure = plots.lines_figure(
    found.lines,
    title=found.title,
    xlabel=found.xlabel,
    ylabel="accuracy (test)",
    log=found.log,
  )
  with files.writing(directory / f"{part}.png"):
    figure.savefig(directory / f"{part}.png", dpi=120)


def markdown(config: Config, findings: Mapping[str, Finding]) -> str:
  """The report for people."""
  lines = [
    f"# The paper's study on {config.data.name}",
    "",
    "```",
    command(),
    "```",
    "",
    hardware(),
    "",
    "What differs from the defaults of `memory_vit/config.py`:",
    "",
    *(f"- `{key} = {value!r}`" for key, value in _changed(config).items()),
  ]
  lines += ["", "## In short"] if findings else []
  for part, found in findings.items():
    lines += ["", f"{found.title} (`{part}`):", ""]
    lines += [f"- {sentence}" for sentence in found.sentences]
  for part, found in findings.items():
    lines += ["", f"## {found.title}", ""]
    if found.rows:
      lines += [markdown_table(found.rows), ""]
    lines += ["\n\n".join(found.notes)]
    if found.lines:
      lines += ["", f"![{found.title}]({part}.png)"]
  return "\n".join(lines).rstrip() + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
  """Rows with the same keys as a table."""
  header = list(rows[0])
  lines = [header, ["---"] * len(header)]
  lines += [[shown(key, row[key]) for key in header] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(key: str, value: Any) -> str:
  """A value of a column, for people."""
  if value is None:
    return ""
  if key in _SHARES:
    return f"{100 * value:.1f} %"
  if key == "spread":  # in points
    return f"{100 * value:.1f}"
  if isinstance(value, int):
    return f"{value:,}"
  if key == "learning rate":
    return str(value)
  if isinstance(value, float):
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.3f}"
  return str(value)


def command() -> str:
  """What was typed last."""
  return " ".join(["python -m memory_vit.paper", *sys.argv[1:]])


def hardware() -> str:
  """On what the study ran; of finished runs, on what it was gone on with."""
  devices = jax.devices()
  return (
    f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), "
    f"{os.cpu_count()} CPU cores, jax {jax.__version__}."
  )


def _changed(config: Config) -> dict[str, Any]:
  """Options that are not at their defaults."""
  found, default = (trees.flatten(to_dict(some)) for some in (config, Config()))
  return {
    f"config.{key.replace('/', '.')}": value
    for key, value in found.items()
    if value != default[key]
  }

"""Directory of an evaluation report: it is written and replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from memory_vit.errors import ConfigError
from memory_vit.model.task import BACKBONE, NAME_RULE, is_name
from memory_vit.plots import rasterize
from memory_vit.reports import metrics_file, page, tables, task_figures
from memory_vit.reports.task_evaluation import TaskEvaluation
from memory_vit.runtime import files, processes
from memory_vit.runtime.messages import brief
from memory_vit.runtime.output_directory import (
  OutputDirectory,
  list_files,
  listed_in,
)

INDEX, OVERVIEW = "index.html", "report.json"
PAGE, METRICS = "report.html", "metrics.json"
_KIND = "memory_vit evaluation report"
REPORT = OutputDirectory("--report", listed_in(OVERVIEW, _KIND))


def write_reports(
  path: str | os.PathLike[str], evaluations: Sequence[TaskEvaluation]
) -> None:
  """Write the reports of tasks to a directory; replace an earlier report.

  The directory gets a folder for each task, report.json with the most important
  numbers of all tasks and, for several tasks, index.html. All processes must
  call; process 0 writes.

  Raises:
    ConfigError: if there are no evaluations, or invalid or repeated task names.
    TrainingError: if the directory cannot be written, or holds files that do
      not belong to a report; these files are kept.
    BrokenDataError: if an image that the report shows can no longer be read.
  """
  _require_names([evaluation.task for evaluation in evaluations])
  processes.on_process_0(lambda: _write(Path(path), evaluations))


def first_page(path: str | os.PathLike[str]) -> Path:
  """Return the index or the only page of a report; raise if neither exists."""
  path = Path(path)
  for file in (path / INDEX, *path.glob(f"*/{PAGE}")):
    if file.exists():
      return file
  raise ConfigError(
    f"{path} holds no report: expected a directory that `write_reports` wrote."
  )


def _require_names(names: Sequence[str]) -> None:
  """Raise if `names` is empty, or if a name in it is invalid or repeated."""
  if not names:
    raise ConfigError("there is no evaluation: expected at least one.")
  for name in names:
    if name != BACKBONE and not is_name(name):
      raise ConfigError(
        f"an evaluation names the task {brief(name)}, which is not a valid "
        f"name: expected {NAME_RULE}."
      )
    if names.count(name) > 1:
      raise ConfigError(
        f"several evaluations have the task name {name!r}: expected different "
        "names, because each task gets a directory with its name."
      )


def _write(path: Path, evaluations: Sequence[TaskEvaluation]) -> None:
  with REPORT.replacing(path, pa.ArrowException) as new:
    for evaluation in evaluations:
      _write_task(new / evaluation.task, evaluation)
    if len(evaluations) > 1:
      (new / INDEX).write_text(page.index_page(evaluations), encoding="utf-8")
    overview = {
      "kind": _KIND,
      "schema": metrics_file.SCHEMA,
      "tasks": [metrics_file.headline(task) for task in evaluations],
      "files": list_files(new),
    }
    files.write_json(new / OVERVIEW, overview)


def _write_task(folder: Path, evaluation: TaskEvaluation) -> None:
  folder.mkdir()
  # Read the images of one task at a time: images of all tasks may not fit into
  # memory.
  images = evaluation.read_mistakes()
  figures = task_figures.figures(evaluation, images)
  plots = {name: rasterize.png(figure) for name, figure in figures.items()}
  for name, content in plots.items():
    (folder / f"{name}.png").write_bytes(content)
  tables.write_tables(folder, evaluation)
  files.write_json(folder / METRICS, metrics_file.to_values(evaluation))
  text = page.report_page(evaluation, plots, images)
  (folder / PAGE).write_text(text, encoding="utf-8")

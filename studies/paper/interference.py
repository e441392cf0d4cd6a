"""Interference of the memories of other tasks, without a mask and with one.

Section 4.4 of the paper (`memory_naive` there): memories that were trained
apart are concatenated, and every token attends to all of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.paper import paper_numbers
from studies.paper.section import Row, Section
from studies.paper.selection import best, select
from studies.paper.study import Study
from studies.paper.trials import StudyTrial
from studies.record import read_json


def best_tasks(
  study: Study, trials: Sequence[StudyTrial]
) -> dict[str, list[Path]]:
  """{regime: tasks}, the first data set first; {} if one diverged."""
  found = {}
  shared = {"cells": study.task.cells, "seed": study.seeds[0]}
  for regime in ("memory", "memory_masked"):
    directories = []
    for name in study.data_sets:
      trial = best(select(trials, regime=regime, data=name, **shared))
      if trial is None or trial.task is None:
        return {}
      directories.append(Path(trial.task))
    found[regime] = directories
  return found


def key(study: Study, tasks: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
  """Everything that the accuracies depend on."""
  return {
    "tasks": [
      read_json(directory / "task.json")["sha256"]
      for directories in tasks.values()
      for directory in directories
    ],
    "data": [study.data.name, study.data.test],
    "dtype": study.config.dtype,
  }


def section(
  study: Study, naive: Sequence[float], masked: Sequence[tuple[float, float]]
) -> Section:
  """Accuracy of the first task among others; [] if a task diverged."""
  first, *others = study.data_sets
  names = [f"own ({first})", *(f"+ {other}" for other in others)]
  paper = [*paper_numbers.INTERFERENCE, *[None] * len(names)]
  measured = enumerate(zip(naive, masked, strict=True))
  rows: list[Row] = [
    {
      "memories": names[i],
      "no mask": unmasked,
      "difference, no mask": unmasked - naive[0],
      "masked": kept,
      "difference, masked": kept - masked[0][0],
      "largest difference of a logit": largest,
      "paper, no mask": paper[i],
    }
    for i, (unmasked, (kept, largest)) in measured
  ]
  missing = "Not measured: a task diverged at every learning rate."
  return Section(
    title="Interference of memories that are put side by side",
    rows=rows,
    notes=(
      *(() if rows else (missing,)),
      f"Tasks of {study.task.cells} cells with the first of the seeds, each "
      "at the learning rate that is best on validation; test split of "
      f"{study.data.name}. Each row adds a memory to those of the rows above; "
      "differences are from the first row. The paper's numbers are of "
      "i-Naturalist, then + Places, + CIFAR, + SUN.",
    ),
  )

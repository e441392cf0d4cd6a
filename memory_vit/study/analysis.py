"""What a study found: for every part a table, sentences, and lines to plot.

Everything here is computed from points that were measured; the paper's own
numbers stand beside.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memory_vit.config import Config
from memory_vit.model.regimes import REGIMES
from memory_vit.study import paper_numbers, runs, wording
from memory_vit.study.selection import Point
from memory_vit.study.wording import (
  choice_of,
  compared,
  label,
  of_regime,
  percent,
)

Row = dict[str, Any]
# Of every point of a line x, mean, least, greatest.
Line = list[tuple[float, float, float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """A part of the report.

  Attributes:
    title: its heading.
    rows: of the table; all have the same keys, which are its header.
    sentences: what the numbers say.
    notes: how they came about.
    lines: {label: points}; empty where there is nothing to plot.
    xlabel: of the plot.
    log: whether its x axis is logarithmic.
  """

  title: str
  rows: list[Row]
  sentences: tuple[str, ...]
  notes: tuple[str, ...] = ()
  lines: Mapping[str, Line] = dataclasses.field(default_factory=dict)
  xlabel: str = ""
  log: bool = False


def table2(config: Config, points: Sequence[Point]) -> Finding:
  """Every regime at its best learning rate."""
  paper = paper_numbers.table2(config)
  regimes = runs.regimes_of(config, "table2")
  rows = [
    _row(config, points, regime, cells)
    for regime in regimes
    for cells in _cells_of(config, regime)
  ]
  if paper:
    for row in rows:
      is_memory = row["regime"] == "memory"
      row["paper"] = paper.get(row["cells"] if is_memory else row["regime"])
  masked = ("memory_masked", config.task.cells)
  memory = ("memory", config.task.cells)
  pairs = (
    (masked, ("cls_masked", 0)),
    (("cls_masked", 0), ("head", 0)),
    (masked, ("head", 0)),
    (("norms_masked", 0), masked),
    (("norms_masked", 0), ("cls_masked", 0)),
    (memory, ("head_cls", 0)),
    (memory, ("full", 0)),
  )
  return Finding(
    title=f"Regimes on {config.data.name} (the paper's Table 2)",
    rows=rows,
    sentences=compared(config, points, pairs),
    notes=(
      wording.REPORTED,
      wording.how_chosen(config, regimes),
      *wording.at_an_end(config, wording.labelled(rows)),
      *_sampling_error(rows, points),
    ),
  )


def placement(config: Config, points: Sequence[Point]) -> Finding:
  """Memory of every layer, which is dropped, against memory that goes on."""
  count = config.task.cells
  regimes = runs.regimes_of(config, "placement")
  rows = [_row(config, points, regime, count) for regime in regimes]
  pairs = [(("memory", count), (regime, count)) for regime in regimes[1:]]
  return Finding(
    title="Where memory enters, and how far it goes",
    rows=rows,
    sentences=compared(config, points, pairs),
    notes=(
      wording.REPORTED,
      wording.how_chosen(config, regimes),
      *wording.at_an_end(config, wording.labelled(rows)),
      *_sampling_error(rows, points),
      "Of `memory` each layer has its own, which is dropped after attention. "
      "`memory_propagated` enters before the first layer and goes on through "
      "all, and to `memory_additive` each layer adds (Figure 2b of the paper, "
      "right and left). The paper says, without numbers, that both did worse.",
    ),
  )


def sensitivity(config: Config, points: Sequence[Point]) -> Finding:
  """Accuracy over learning rate."""
  lines, rows = {}, {}
  regimes = runs.regimes_of(config, "sensitivity")
  for regime in regimes:
    cells = config.task.cells if REGIMES[regime].has_memory else 0
    name = label(regime, cells)
    some = of_regime(config, points, regime, cells)
    seed = runs.search_seed(config, regime)
    if seed is not None:  # further seeds know one rate alone
      some = [point for point in some if point.seed == seed]
    lines[name], mine = [], []
    for rate in sorted(config.study.learning_rates):
      seeds = [p for p in some if p.learning_rate == rate]
      tests = [p.test for p in seeds if p.test is not None]
      lost = len(seeds) - len(tests)
      mine.append(
        {
          "regime": regime,
          "cells": cells or None,
          "learning rate": rate,
          "test": float(np.mean(tests)) if tests else None,
          "spread": max(tests) - min(tests) if len(tests) > 1 else None,
          "seeds": len(tests),
          "diverged": f"{lost} of {len(seeds)}" if lost else None,
        }
      )
      if tests:
        lines[name].append((rate, *_mean_and_range(tests)))
    rows[name] = mine
  rates = config.study.learning_rates
  return Finding(
    title="Sensitivity to the learning rate",
    rows=[row for some in rows.values() for row in some],
    sentences=(
      f"There are {len(rates)} learning rates, {min(rates)} to {max(rates)}.",
      *(_sensitivity_of(name, some) for name, some in rows.items()),
      *_widest(rows),
    ),
    notes=(
      "Means over the seeds that did not diverge, on the test split; "
      + "; ".join(
        f"{regime}: {wording.count(len(config.study.seeds), 'seed')}"
        if runs.search_seed(config, regime) is None
        else f"{regime}: the first seed alone"
        for regime in regimes
      )
      + ".",
    ),
    lines=lines,
    xlabel="learning rate",
    log=True,
  )


def cells(config: Config, points: Sequence[Point]) -> Finding:
  """Accuracy over cells, with and without mask and memory."""
  kinds = {
    "memory_masked": ("mask", "memory"),
    "cls_masked": ("mask", "no memory"),
    "memory": ("full attention", "memory"),
    "head_cls": ("full attention", "no memory"),
  }
  regimes = runs.regimes_of(config, "cells")
  rows, lines = [], {}
  for regime in (regime for regime in kinds if regime in regimes):
    attention, memory = kinds[regime]
    line = lines.setdefault(f"{attention}, {memory}", [])
    counts = sorted(_cells_of(config, regime))
    for count in counts:
      choice = choice_of(config, points, regime, count)
      rows.append(
        {"attention": attention, "regime": regime, "cells": count,
         **wording.columns(choice)}
      )  # fmt: skip
      if choice is None:
        continue
      # Without memory there is one number, whatever the cells are.
      for x in (count,) if count else sorted(config.study.cells):
        line.append((x, *_mean_and_range(choice.tests)))
  masked = ("memory_masked", config.task.cells)
  memory = ("memory", config.task.cells)
  fewest, most = min(config.study.cells), max(config.study.cells)
  pairs = (
    (memory, ("head_cls", 0)),
    (masked, ("cls_masked", 0)),
    (masked, memory),
    *(
      ((regime, most), (regime, fewest))
      for regime in ("memory_masked", "memory")
      if most > fewest
    ),
  )
  return Finding(
    title="Cells, with and without a mask",
    rows=rows,
    sentences=compared(config, points, pairs),
    notes=(
      wording.REPORTED,
      wording.how_chosen(config, regimes),
      *wording.at_an_end(config, wording.labelled(rows)),
    ),
    lines=lines,
    xlabel="cells",
  )


def _row(
  config: Config, points: Sequence[Point], regime: str, cells: int
) -> Row:
  """A regime at its best learning rate."""
  return {
    "regime": regime,
    "cells": cells or None,
    **wording.columns(choice_of(config, points, regime, cells)),
  }


def _cells_of(config: Config, regime: str) -> tuple[int, ...]:
  """Numbers of cells of a regime that is learned with all; 0 without memory."""
  return config.study.cells if REGIMES[regime].has_memory else (0,)


def _sensitivity_of(name: str, rows: Sequence[Row]) -> str:
  """What one regime does over the learning rates."""
  means = _means(rows)
  lost = sum(row["diverged"] is not None for row in rows)
  diverges = f"diverges at {lost} of them" if lost else "diverges at none"
  if not means:
    return f"{name} diverges at all of them."
  span = 100 * (max(means) - min(means))
  return (
    f"{name} lies between {percent(min(means))} and {percent(max(means))}, "
    f"{span:.1f} points apart, and {diverges}."
  )


def _widest(rows: Mapping[str, Sequence[Row]]) -> tuple[str, ...]:
  """Which of several regimes the learning rate moves most."""
  means = {name: _means(some) for name, some in rows.items()}
  spans = {name: max(some) - min(some) for name, some in means.items() if some}
  if len(spans) < 2:
    return ()
  widest = max(spans, key=spans.get)
  return (
    f"The widest range is that of {widest}, where divergence is left out.",
  )


def _means(rows: Sequence[Row]) -> list[float]:
  return [row["test"] for row in rows if row["test"] is not None]


def _sampling_error(
  rows: Sequence[Row], points: Sequence[Point]
) -> tuple[str, ...]:
  """How far an accuracy lies off because the test split is finite."""
  tests = _means(rows)
  examples = {p.examples for p in points if p.examples}
  if not (tests and examples):
    return ()
  middle, count = float(np.median(tests)), min(examples)
  error = 100 * math.sqrt(middle * (1 - middle) / count)
  return (
    f"The test split has {count:,} pictures: as a sample of all that there "
    f"could be, {percent(middle)} has a standard error of {error:.1f} points, "
    "which further seeds do not lessen.",
  )


def _mean_and_range(values: Sequence[float]) -> tuple[float, float, float]:
  return float(np.mean(values)), min(values), max(values)

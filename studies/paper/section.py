"""Sections of the report: tables of the best learning rates, comparisons."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from studies.paper.selection import BestRate, choose, select
from studies.paper.study import Study
from studies.paper.trials import StudyTrial

Row = dict[str, Any]
# Points of a line: x, mean, lowest, highest.
Line = list[tuple[float, float, float, float]]


class Setting(NamedTuple):
  """A regime with a number of cells, 0 without memory."""

  regime: str
  cells: int = 0

  @property
  def label(self) -> str:
    if not self.cells:
      return self.regime
    plural = "" if self.cells == 1 else "s"
    return f"{self.regime} ({self.cells} cell{plural})"

  @property
  def columns(self) -> Row:
    return {"regime": self.regime, "cells": self.cells or None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
  """A part of the report; the keys of its rows become the header."""

  title: str
  rows: list[Row]
  # Rows of a second table, of differences.
  comparisons: list[Row] = dataclasses.field(default_factory=list)
  notes: tuple[str, ...] = ()
  # {label: points} of the plot; empty for no plot.
  lines: Mapping[str, Line] = dataclasses.field(default_factory=dict)
  xlabel: str = ""
  log: bool = False  # of the x axis


def on_first_data(
  study: Study, trials: Sequence[StudyTrial], setting: Setting
) -> list[StudyTrial]:
  values = setting._asdict()
  return select(trials, data=study.data.name, **values)


def best_rate(
  study: Study, trials: Sequence[StudyTrial], setting: Setting
) -> BestRate | None:
  """Choose the learning rate of a regime on the first data set."""
  seed = study.search_seed(setting.regime)
  return choose(on_first_data(study, trials, setting), seed)


def rate_columns(study: Study, regime: str, rate: BestRate | None) -> Row:
  """Columns of a table; accuracies are None if all rates diverged."""
  seed, rates = study.search_seed(regime), study.learning_rates
  chosen = "mean of the seeds" if seed is None else f"seed {seed}"
  ends = {max(rates): "highest", min(rates): "lowest"}
  return {
    "learning rate": rate and rate.learning_rate,
    "end of range": rate and ends.get(rate.learning_rate),
    "chosen by": chosen,
    "validation": rate and rate.validation,
    "test": rate and rate.test,
    "spread": rate and rate.spread,
    "standard error": rate and rate.standard_error,
    "seeds": len(rate.tests) if rate else 0,
    "diverged": _diverged(rate),
  }


def compare_settings(
  study: Study,
  trials: Sequence[StudyTrial],
  pairs: Sequence[tuple[Setting, Setting]],
) -> list[Row]:
  """Rows of the pairs whose regimes both run."""
  wanted = study.regimes
  return [
    compare(
      one.label,
      best_rate(study, trials, one),
      other.label,
      best_rate(study, trials, other),
    )
    for one, other in pairs
    if not wanted or {one.regime, other.regime} <= {*wanted}
  ]


def compare(
  one: str, first: BestRate | None, other: str, second: BestRate | None
) -> Row:
  """A row: the difference of two test accuracies, and the larger spread."""
  difference = spread = beyond = None
  if first and second:
    difference = first.test - second.test
    if first.spread is not None and second.spread is not None:
      spread = max(first.spread, second.spread)
      # A difference that is shown as 0.0 points is not beyond the spread.
      beyond = abs(difference) > max(spread, 0.0005)
  diverged = [
    f"{name}: {_diverged(rate)}"
    for name, rate in ((one, first), (other, second))
    if rate is None or rate.diverged
  ]
  return {
    "regime": one,
    "compared to": other,
    "difference": difference,
    "spread": spread,
    "beyond spread": beyond,
    "diverged": ", ".join(diverged) or None,
  }


def _diverged(rate: BestRate | None) -> str | None:
  """The number of seeds that diverged, "1 of 3"; None for none."""
  if rate is None:
    return "at every rate"
  if not rate.diverged:
    return None
  return f"{rate.diverged} of {len(rate.tests) + rate.diverged}"

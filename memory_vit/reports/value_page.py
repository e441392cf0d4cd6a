"""The report of a task of values (regression): errors, R2, figures, tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memory_vit import plots as figures_lib
from memory_vit.kinds import value_metrics
from memory_vit.kinds.predictions import ValuePredictions
from memory_vit.kinds.value_metrics import ValueMetrics
from memory_vit.reports import tables
from memory_vit.reports.document import (
  MISSING,
  MOST_ROWS,
  Number,
  cut_table,
  number,
  plot,
)
from memory_vit.reports.markup import Html
from memory_vit.reports.task_evaluation import TaskEvaluation, overall
from memory_vit.runtime import messages

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_MEANINGS = {
  "R2": "share of the variance of a value that the predictions explain: 1 is "
  "best, and always predicting the mean of the split gives 0.",
  "Spearman": "rank correlation of predicted and true values: 1 if both have "
  "the same order.",
  "MAE": "mean absolute error, in the unit of the value.",
  "RMSE": "root of the mean squared error, in the unit of the value: large "
  "errors count more.",
  "several values": "each number is a mean over the values; the table on the "
  "page of the task has the numbers of each value.",
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ValueEvaluation(TaskEvaluation):
  """Evaluation of a task of values."""

  kind, noun = "values", "value"
  worst_title = "Greatest errors"
  in_index = ("R2", "Spearman", "MAE", "RMSE")
  meanings = _MEANINGS
  calibration = None
  predictions: ValuePredictions

  @functools.cached_property
  def each(self) -> ValueMetrics:
    return value_metrics.value_metrics(self.predictions)

  @functools.cached_property
  def summary(self) -> Mapping[str, Any]:
    return overall(self, value_metrics.evaluation_of(self.predictions))

  @functools.cached_property
  def _errors(self) -> np.ndarray:
    """Array (examples, values): absolute error / `std`; 0 if not predicted."""
    predictions = self.predictions
    errors = np.abs(predictions.predicted - predictions.target) / np.array(
      predictions.kind.std
    )
    return np.where(predictions.has_prediction[:, None], errors, 0)

  def _mistake_texts(self, number: int) -> tuple[str, str, str]:
    predictions = self.predictions
    # Of all values of the image, show only the one with the greatest error.
    worst = int(self._errors[number].argmax())
    unit = predictions.kind.units[worst] if predictions.kind.units else ""
    name = f"{self.class_names[worst]} " if predictions.num_classes > 1 else ""
    target, predicted = (
      float(rows[number, worst])
      for rows in (predictions.target, predictions.predicted)
    )
    right, guess, error = (
      f"{messages.number(value)} {unit}".rstrip()
      for value in (target, predicted, predicted - target)
    )
    return f"{name}{right}", guess, f"error {error}"

  def show_score(self, score: float | None) -> str:
    return number(score)

  def numbers(self) -> list[Number]:
    summary = self.summary
    units = {*self.predictions.kind.units}
    unit = units.pop() if len(units) == 1 else ""
    return [
      ("R2", number(summary["r2"]), ""),
      ("Spearman", number(summary["spearman"]), ""),
      ("MAE", number(summary["mae"], unit), ""),
      ("RMSE", number(summary["rmse"], unit), ""),
    ]

  def sections(
    self, plots: Mapping[str, bytes]
  ) -> dict[str, tuple[str, list[Html]]]:
    scatter = plot(plots["scatter"], "Predicted values against true values")
    return {
      "scatter": ("Predicted and true values", [scatter]),
      "values": ("Values", _values(self)),
    }

  @property
  def each_columns(self) -> Mapping[str, Sequence[str]]:
    units = self.predictions.kind.units
    return {"unit": list(units)} if units else {}

  def figures(self) -> dict[str, Figure]:
    predictions = self.predictions
    some = predictions.has_prediction
    scatter = figures_lib.scatter_figure(
      predictions.target[some], predictions.predicted[some], self.class_names,
      predictions.kind.units,
    )  # fmt: skip
    return {"scatter": scatter}

  def write_predictions(self, folder: Path) -> None:
    tables.write_values(folder, self)


def _values(evaluation: ValueEvaluation) -> list[Html]:
  metrics, names = evaluation.each, evaluation.class_names
  units = evaluation.predictions.kind.units or ("",) * len(names)
  columns = (metrics.r2, metrics.spearman, metrics.mae, metrics.rmse)
  rows = [
    (names[i], units[i] or MISSING, *(number(column[i]) for column in columns))
    for i in range(min(len(names), MOST_ROWS))
  ]
  header = ("value", "unit", "R2", "Spearman", "MAE", "RMSE")
  return cut_table(
    header, rows, total=len(names), file="per_value.csv", order="",
    names=(0, 1), label="values",
  )  # fmt: skip

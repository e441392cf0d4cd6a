"""The part of a report's page about values (regression): errors and R2."""

from __future__ import annotations

from collections.abc import Mapping

from memory_vit.reports.document import (
  MISSING,
  MOST_ROWS,
  Number,
  cut_table,
  number,
  plot,
)
from memory_vit.reports.markup import Html
from memory_vit.reports.task_evaluation import ValueEvaluation

WORST = "Greatest errors"
IN_INDEX = ("R2", "Spearman", "MAE", "RMSE")
MEANINGS = {
  "R2": "share of the variance of a value that the predictions explain: 1 is "
  "best, and always predicting the mean of the split is 0.",
  "Spearman": "rank correlation of predicted and true values: 1 if they have "
  "the same order.",
  "MAE": "mean absolute error, in the unit of the value.",
  "RMSE": "root of the mean squared error, in the unit of the value: great "
  "errors count more.",
  "several values": "their numbers are means over the values; the table has "
  "those of each.",
}


def numbers(evaluation: ValueEvaluation) -> list[Number]:
  found = evaluation.summary
  units = {*evaluation.predictions.kind.units}
  unit = units.pop() if len(units) == 1 else ""
  return [
    ("R2", number(found["r2"]), ""),
    ("Spearman", number(found["spearman"]), ""),
    ("MAE", number(found["mae"], unit), ""),
    ("RMSE", number(found["rmse"], unit), ""),
  ]


def sections(
  evaluation: ValueEvaluation, plots: Mapping[str, bytes]
) -> dict[str, tuple[str, list[Html]]]:
  """{anchor: (title, content)}."""
  scatter = plot(plots["scatter"], "Predicted values against true values")
  return {
    "scatter": ("Predicted and true values", [scatter]),
    "values": ("Values", _values(evaluation)),
  }


def _values(evaluation: ValueEvaluation) -> list[Html]:
  found, names = evaluation.each, evaluation.class_names
  units = evaluation.predictions.kind.units or ("",) * len(names)
  columns = (found.r2, found.spearman, found.mae, found.rmse)
  rows = [
    (names[i], units[i] or MISSING, *(number(each[i]) for each in columns))
    for i in range(min(len(names), MOST_ROWS))
  ]
  header = ("value", "unit", "R2", "Spearman", "MAE", "RMSE")
  return cut_table(
    header, rows, total=len(names), file="per_value.csv", order="",
    names=(0, 1), label="values",
  )  # fmt: skip

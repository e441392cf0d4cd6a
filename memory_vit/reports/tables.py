"""Tables of an evaluation: CSV for spreadsheets, Parquet for programs.

CSV files have an apostrophe before names that a spreadsheet would take for
formulas; Parquet files have the names unchanged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from memory_vit.kinds.task_kind import REJECTION_TYPES
from memory_vit.runtime import parquet
from memory_vit.runtime.messages import escaped, utf8
from memory_vit.runtime.tables import write_csv

if TYPE_CHECKING:
  from memory_vit.kinds.predictions import SplitPredictions
  from memory_vit.reports.class_page import ClassEvaluation
  from memory_vit.reports.label_page import LabelEvaluation
  from memory_vit.reports.task_evaluation import TaskEvaluation
  from memory_vit.reports.value_page import ValueEvaluation

CSV, PARQUET = "predictions.csv", "predictions.parquet"
_EXAMPLE = [
  pa.field("example", pa.int64(), nullable=False),
  pa.field("file", pa.string()),
]
_SCHEMA = pa.schema([
  *_EXAMPLE,
  pa.field("label_index", pa.int32(), nullable=False),
  pa.field("label", pa.string(), nullable=False),
  pa.field("correct", pa.bool_(), nullable=False),
  pa.field("loss", pa.float32()),
  pa.field("top_classes", pa.list_(pa.string())),
  pa.field("top_indices", pa.list_(pa.int32())),
  pa.field("top_probabilities", pa.list_(pa.float32())),
])  # fmt: skip


def write_tables(folder: Path, evaluation: TaskEvaluation) -> None:
  """Write tables of the metrics of each output and of all predictions."""
  _write_each(folder, evaluation)
  evaluation.write_predictions(folder)


def write_predictions_parquet(path: Path, evaluation: ClassEvaluation) -> None:
  """Write a row for each example that could be read.

  For outputs that are not finite, the best classes and the loss are null.
  """
  predictions = evaluation.predictions
  numbers = np.flatnonzero(predictions.counted)
  missing = ~predictions.finite[numbers]
  names = np.array([utf8(name) for name in evaluation.class_names], object)
  top = predictions.top_classes[numbers]
  columns = _example_columns(evaluation, numbers)
  columns["label"] = names[predictions.label[numbers]].tolist()
  columns |= {
    "top_classes": _lists(pa.array(names[top].ravel(), pa.string()), missing),
    "top_indices": _lists(pa.array(top.ravel()), missing),
    "top_probabilities": _lists(
      pa.array(predictions.top_probabilities[numbers].ravel()), missing
    ),
  }
  schema = _SCHEMA
  for name in REJECTION_TYPES:
    if name in columns:
      schema = schema.append(pa.field(name, columns[name].type))
  _write_parquet(path, evaluation, columns, schema)


def _write_parquet(
  path: Path,
  evaluation: TaskEvaluation,
  columns: dict[str, Any],
  schema: pa.Schema | None = None,
) -> None:
  about = {
    "task": evaluation.task,
    "data": utf8(evaluation.data),
    "split": utf8(evaluation.split),
  }
  files = [utf8(file) if file else None for file in columns["file"]]
  columns = columns | {"file": pa.array(files, pa.string())}
  metadata = {parquet.METADATA: json.dumps(about).encode()}
  table = pa.table(columns, schema=schema).replace_schema_metadata(metadata)
  pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def write_predictions_csv(path: Path, evaluation: ClassEvaluation) -> None:
  """Write the rows of the Parquet file, with three columns per best class."""
  predictions = evaluation.predictions
  numbers = np.flatnonzero(predictions.counted)
  missing = ~predictions.finite[numbers]
  names = np.array([*evaluation.class_names, None], object)
  columns = _example_columns(evaluation, numbers)
  for i in range(predictions.top_classes.shape[1]):
    best = predictions.top_classes[numbers, i]
    shares = predictions.top_probabilities[numbers, i]
    columns |= {
      f"top_index_{i + 1}": pa.array(best, mask=missing),
      f"top_class_{i + 1}": names[np.where(missing, -1, best)].tolist(),
      f"top_probability_{i + 1}": pa.array(shares, mask=missing),
    }
  write_csv(path, columns)


def _example_columns(
  evaluation: ClassEvaluation, numbers: np.ndarray
) -> dict[str, Any]:
  """Return columns for both CSV and Parquet; class names are not escaped."""
  predictions = evaluation.predictions
  names, labels = evaluation.class_names, predictions.label[numbers]
  return {
    **_of_examples(evaluation, numbers),
    "label_index": pa.array(labels),
    "label": [names[label] for label in labels.tolist()],
    "correct": pa.array(predictions.correct[numbers]),
    "loss": pa.array(
      predictions.loss[numbers], mask=~predictions.finite[numbers]
    ),
    **_rejection(predictions, numbers),
  }


def _rejection(
  predictions: SplitPredictions, numbers: np.ndarray
) -> dict[str, Any]:
  """Return columns about rejected images; {} if no image can be rejected."""
  if predictions.unknown_below is None:
    return {}
  missing = ~predictions.finite[numbers]
  return {
    "unknown": pa.array(predictions.unknown[numbers], mask=missing),
    "known_score": pa.array(predictions.known_score[numbers], mask=missing),
  }


def _of_examples(
  evaluation: TaskEvaluation, numbers: np.ndarray
) -> dict[str, Any]:
  return {
    "example": pa.array(numbers),
    "file": [evaluation.file_name(i) or None for i in numbers.tolist()],
  }


def write_labels(folder: Path, evaluation: LabelEvaluation) -> None:
  """Write the true labels, the predicted labels and all probabilities."""
  predictions, names = evaluation.predictions, evaluation.class_names
  numbers = np.flatnonzero(predictions.counted)
  missing = ~predictions.finite[numbers]
  shares = predictions.probability[numbers].astype(np.float32)

  def named(rows: np.ndarray) -> list[list[str]]:
    return [[utf8(names[i]) for i in np.flatnonzero(row)] for row in rows]

  columns = _of_examples(evaluation, numbers)
  columns["labels"] = pa.array(
    named(predictions.label[numbers] > 0.5), pa.list_(pa.string())
  )
  columns["predicted"] = pa.array(
    named(predictions.predicted_labels[numbers]),
    pa.list_(pa.string()),
    mask=missing,
  )
  texts = {
    name: pc.binary_join(columns[name], "|").to_pylist()
    for name in ("labels", "predicted")
  }
  cells = _cells("probability", names, shares, missing)
  write_csv(folder / CSV, columns | texts | cells)
  columns["probabilities"] = _lists(pa.array(shares.ravel()), missing)
  _write_parquet(folder / PARQUET, evaluation, columns)


def write_values(folder: Path, evaluation: ValueEvaluation) -> None:
  """Write the true and the predicted values, in their units."""
  predictions, names = evaluation.predictions, evaluation.class_names
  numbers = np.flatnonzero(predictions.counted)
  columns = _of_examples(evaluation, numbers)
  cells: dict[str, pa.Array] = {}
  lists: dict[str, pa.Array] = {}
  for column, all_rows, missing in (
    ("value", predictions.target, np.zeros(len(numbers), bool)),
    ("predicted", predictions.rounded, ~predictions.finite[numbers]),
  ):
    rows = all_rows[numbers]
    cells |= _cells(column, names, rows, missing)
    lists[column] = _lists(pa.array(rows.ravel()), missing)
  write_csv(folder / CSV, columns | cells)
  _write_parquet(folder / PARQUET, evaluation, columns | lists)


def _cells(
  prefix: str, names: Sequence[str], rows: np.ndarray, missing: np.ndarray
) -> dict[str, pa.Array]:
  """Return {title: column}, a column for each output.

  A title ends in the name of the output, or in its index if names repeat.
  """
  names = [*map(escaped, names)]
  if len({*names}) < len(names):
    names = [*map(str, range(len(names)))]
  return {
    f"{prefix}: {name}": pa.array(rows[:, i], mask=missing)
    for i, name in enumerate(names)
  }


def _write_each(folder: Path, evaluation: TaskEvaluation) -> None:
  """Write a CSV file with a row of metrics for each class, label or value."""
  columns: dict[str, Any] = {
    "index": pa.array(range(len(evaluation.class_names))),
    evaluation.noun: list(evaluation.class_names),
  }
  columns |= evaluation.each_columns
  for field in dataclasses.fields(evaluation.each):
    values = getattr(evaluation.each, field.name)
    columns[field.name] = pa.array(values, mask=np.isnan(values))
  write_csv(folder / f"per_{evaluation.noun}.csv", columns)


def write_confusions_csv(path: Path, evaluation: ClassEvaluation) -> None:
  """Write a row for each cell of the confusion matrix that is not 0.

  A table of all cells would take gigabytes for 20,000 classes.
  """
  matrix = evaluation.confusion.tocoo()
  order = np.lexsort(matrix.coords[::-1])
  label, predicted = (indices[order] for indices in matrix.coords)
  names = np.array(evaluation.class_names, object)
  columns = {
    "label_index": pa.array(label),
    "label": names[label].tolist(),
    "predicted_index": pa.array(predicted),
    "predicted": names[predicted].tolist(),
    "examples": pa.array(matrix.data[order]),
  }
  write_csv(path, columns)


def _lists(values: pa.Array, missing: np.ndarray) -> pa.Array:
  """Return n * k `values` as n lists of k; list i is null if `missing[i]`."""
  # Null lists get length 0, as older versions of Arrow require.
  k = len(values) // max(1, len(missing))
  ends = np.cumsum([0, *np.where(missing, 0, k)]).astype(np.int32)
  flat = values.filter(pa.array(~missing.repeat(k)))
  return pa.ListArray.from_arrays(pa.array(ends), flat, mask=pa.array(missing))

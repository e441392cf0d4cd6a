"""Tables of an evaluation: CSV for people, Parquet for programs.

In CSV a name that a spreadsheet would take for a formula has an apostrophe in
front; in Parquet names are as they are.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memory_vit.reports.names import csv_cell
from memory_vit.reports.task_evaluation import TaskEvaluation
from memory_vit.runtime import parquet
from memory_vit.runtime.messages import utf8

_SCHEMA = pa.schema([
  pa.field("example", pa.int64(), nullable=False),
  pa.field("file", pa.string()),
  pa.field("label_index", pa.int32(), nullable=False),
  pa.field("label", pa.string(), nullable=False),
  pa.field("correct", pa.bool_(), nullable=False),
  pa.field("loss", pa.float32()),
  pa.field("top_classes", pa.list_(pa.string())),
  pa.field("top_indices", pa.list_(pa.int32())),
  pa.field("top_probabilities", pa.list_(pa.float32())),
])  # fmt: skip


def write_predictions_parquet(path: Path, evaluation: TaskEvaluation) -> None:
  """Write a row for each example that could be read.

  One without a prediction has null for the best classes and for the loss.
  """
  predictions = evaluation.predictions
  numbers = np.flatnonzero(predictions.counted)
  names = np.array([utf8(name) for name in evaluation.class_names], object)
  without = ~predictions.finite[numbers]
  top = predictions.top_classes[numbers]
  columns = [
    pa.array(numbers),
    pa.array(
      [utf8(file) or None for file in _files(evaluation, numbers)], pa.string()
    ),
    pa.array(predictions.label[numbers]),
    pa.array(names[predictions.label[numbers]], pa.string()),
    pa.array(predictions.correct[numbers]),
    pa.array(predictions.loss[numbers], mask=without),
    _lists(pa.array(names[top].ravel(), pa.string()), without),
    _lists(pa.array(top.ravel()), without),
    _lists(pa.array(predictions.top_probabilities[numbers].ravel()), without),
  ]
  about = {
    "task": evaluation.task,
    "data": utf8(evaluation.data),
    "split": utf8(evaluation.split),
  }
  schema = _SCHEMA.with_metadata({parquet.METADATA: json.dumps(about).encode()})
  table = pa.Table.from_arrays(columns, schema=schema)
  pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def write_predictions_csv(path: Path, evaluation: TaskEvaluation) -> None:
  """Write the same rows; a column for each of the best classes."""
  places = range(1, evaluation.predictions.top_classes.shape[1] + 1)
  guesses = [
    f"{name}_{place}"
    for place in places
    for name in ("top_index", "top_class", "top_probability")
  ]
  header = ["example", "file", "label_index", "label", "correct", "loss"]
  _write_csv(path, header + guesses, _prediction_rows(evaluation))


def write_classes_csv(path: Path, evaluation: TaskEvaluation) -> None:
  """Write a row for each class."""
  classes = evaluation.classes
  header = ("index", "class", "support", "predicted", "precision", "recall",
            "f1")  # fmt: skip
  rows = zip(
    range(len(evaluation.class_names)),
    map(csv_cell, evaluation.class_names),
    classes.support.tolist(),
    classes.predicted.tolist(),
    *(
      map(_number, values.tolist())
      for values in (classes.precision, classes.recall, classes.f1)
    ),
    strict=True,
  )
  _write_csv(path, header, rows)


def write_confusions_csv(path: Path, evaluation: TaskEvaluation) -> None:
  """Write a row for each cell of the confusion matrix that is not 0.

  As a square those of 20,000 classes would take gigabytes.
  """
  found = evaluation.confusion.tocoo()
  cells = zip(*found.coords, found.data, strict=True)
  names = [csv_cell(name) for name in evaluation.class_names]
  rows = (
    (label, names[label], best, names[best], examples)
    for label, best, examples in sorted(cells)
  )
  header = ("label_index", "label", "predicted_index", "predicted", "examples")
  _write_csv(path, header, rows)


def _prediction_rows(evaluation: TaskEvaluation) -> Iterator[list[Any]]:
  """The rows of the table of predictions, in the order of the split."""
  predictions = evaluation.predictions
  names = [csv_cell(name) for name in evaluation.class_names]
  numbers = np.flatnonzero(predictions.counted)
  for i, file in zip(
    numbers.tolist(), _files(evaluation, numbers), strict=True
  ):
    label = int(predictions.label[i])
    row = [i, csv_cell(file), label, names[label]]
    row.append(str(predictions.correct[i]).lower())
    if not predictions.finite[i]:
      yield row + [""] * (1 + 3 * predictions.top_classes.shape[1])
      continue
    row.append(_number(predictions.loss[i]))
    for best, share in zip(
      predictions.top_classes[i], predictions.top_probabilities[i], strict=True
    ):
      row += [best, names[best], _number(share)]
    yield row


def _files(evaluation: TaskEvaluation, numbers: np.ndarray) -> list[str]:
  return [evaluation.file_name(number) for number in numbers.tolist()]


def _lists(values: pa.Array, missing: np.ndarray) -> pa.Array:
  """Values (n * k,) as n lists of k; some of them null.

  Those have no values of their own, which older Arrow does not write.
  """
  k = len(values) // max(1, len(missing))
  ends = np.cumsum([0, *np.where(missing, 0, k)]).astype(np.int32)
  kept = values.filter(pa.array(~missing.repeat(k)))
  return pa.ListArray.from_arrays(pa.array(ends), kept, mask=pa.array(missing))


def _number(value: float) -> str:
  """A number with all digits of a float32; what is none stays empty."""
  return f"{value:.9g}" if math.isfinite(value) else ""


def _write_csv(
  path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
  """Write a table in UTF-8, without a byte order mark."""
  with path.open("w", encoding="utf-8", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)

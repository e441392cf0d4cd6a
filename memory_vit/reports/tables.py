"""Tables of an evaluation: CSV for spreadsheets, Parquet for programs.

In CSV an apostrophe stands in front of names that a spreadsheet would take for
formulas; in Parquet names are as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memory_vit.reports.task_evaluation import TaskEvaluation
from memory_vit.runtime import parquet
from memory_vit.runtime.messages import utf8
from memory_vit.runtime.tables import write_csv

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

  The best classes and the loss are null if outputs are not finite.
  """
  predictions = evaluation.predictions
  numbers = np.flatnonzero(predictions.counted)
  without = ~predictions.finite[numbers]
  names = np.array([utf8(name) for name in evaluation.class_names], object)
  top = predictions.top_classes[numbers]
  columns = _example_columns(evaluation, numbers)
  columns["file"] = [utf8(file) if file else None for file in columns["file"]]
  columns["label"] = names[predictions.label[numbers]].tolist()
  columns |= {
    "top_classes": _lists(pa.array(names[top].ravel(), pa.string()), without),
    "top_indices": _lists(pa.array(top.ravel()), without),
    "top_probabilities": _lists(
      pa.array(predictions.top_probabilities[numbers].ravel()), without
    ),
  }
  about = {
    "task": evaluation.task,
    "data": utf8(evaluation.data),
    "split": utf8(evaluation.split),
  }
  schema = _SCHEMA.with_metadata({parquet.METADATA: json.dumps(about).encode()})
  table = pa.table(columns, schema=schema)
  pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def write_predictions_csv(path: Path, evaluation: TaskEvaluation) -> None:
  """Write the same rows, with three columns for each of the best classes."""
  predictions = evaluation.predictions
  numbers = np.flatnonzero(predictions.counted)
  without = ~predictions.finite[numbers]
  names = np.array([*evaluation.class_names, None], object)
  columns = _example_columns(evaluation, numbers)
  for i in range(predictions.top_classes.shape[1]):
    best = predictions.top_classes[numbers, i]
    shares = predictions.top_probabilities[numbers, i]
    columns |= {
      f"top_index_{i + 1}": pa.array(best, mask=without),
      f"top_class_{i + 1}": names[np.where(without, -1, best)].tolist(),
      f"top_probability_{i + 1}": pa.array(shares, mask=without),
    }
  write_csv(path, columns)


def _example_columns(
  evaluation: TaskEvaluation, numbers: np.ndarray
) -> dict[str, Any]:
  """Columns that describe examples, and the loss; names as they are."""
  predictions = evaluation.predictions
  names, labels = evaluation.class_names, predictions.label[numbers]
  return {
    "example": pa.array(numbers),
    "file": [evaluation.file_name(i) or None for i in numbers.tolist()],
    "label_index": pa.array(labels),
    "label": [names[label] for label in labels.tolist()],
    "correct": pa.array(predictions.correct[numbers]),
    "loss": pa.array(
      predictions.loss[numbers], mask=~predictions.finite[numbers]
    ),
  }


def write_classes_csv(path: Path, evaluation: TaskEvaluation) -> None:
  """Write a row for each class."""
  classes = evaluation.classes
  shares = {
    name: pa.array(values.astype(np.float32), mask=np.isnan(values))
    for name, values in (
      ("precision", classes.precision),
      ("recall", classes.recall),
      ("f1", classes.f1),
    )
  }
  columns = {
    "index": pa.array(range(len(evaluation.class_names))),
    "class": list(evaluation.class_names),
    "support": pa.array(classes.support),
    "predicted": pa.array(classes.predicted),
  }
  write_csv(path, columns | shares)


def write_confusions_csv(path: Path, evaluation: TaskEvaluation) -> None:
  """Write a row for each cell of the confusion matrix that is not 0.

  A square matrix of 20,000 classes would take gigabytes.
  """
  found = evaluation.confusion.tocoo()
  order = np.lexsort(found.coords[::-1])
  label, predicted = (place[order] for place in found.coords)
  names = np.array(evaluation.class_names, object)
  columns = {
    "label_index": pa.array(label),
    "label": names[label].tolist(),
    "predicted_index": pa.array(predicted),
    "predicted": names[predicted].tolist(),
    "examples": pa.array(found.data[order]),
  }
  write_csv(path, columns)


def _lists(values: pa.Array, missing: np.ndarray) -> pa.Array:
  """Values (n * k,) as n lists of k; null ones are empty for older Arrow."""
  k = len(values) // max(1, len(missing))
  ends = np.cumsum([0, *np.where(missing, 0, k)]).astype(np.int32)
  kept = values.filter(pa.array(~missing.repeat(k)))
  return pa.ListArray.from_arrays(pa.array(ends), kept, mask=pa.array(missing))

"""Predict from columns: arrays of NumPy by their names, in and out.

`map_batches` of Ray Data passes batches to a class in this form.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.errors import DataError
from memory_vit.prediction.predictions import Predictions
from memory_vit.runtime.messages import brief, name_list

# Of several the first is read.
IMAGE_COLUMNS = ("pixels", "image", "path")


def image_column(columns: Mapping[str, Any]) -> str:
  """The column that holds the images."""
  for name in IMAGE_COLUMNS:
    if name in columns:
      return name
  raise DataError(
    f"the columns are {brief(name_list(list(map(str, columns))))}, expected "
    "one of 'image' (bytes of files, or uint8 arrays), 'path', or 'pixels' "
    "(prepared images)."
  )


def passed_through(
  columns: Mapping[str, Any], read: str
) -> dict[str, np.ndarray]:
  """The columns that were not read; paths stay, as they name the images."""
  return {
    name: column
    for name, column in columns.items()
    if name != read or name == "path"
  }


def prediction_columns(
  predictions: Predictions, top: int
) -> dict[str, np.ndarray]:
  """Predictions for k images as columns of k rows.

  For each task NAME "NAME/logits", float32 (k, c); and by its kind

    classes  "NAME/probabilities" float32 (k, c), "NAME/top_indices" int32 (k,
             top), "NAME/top_probabilities" float32 (k, top) and
             "NAME/top_classes", text (k, top); of a task that rejects images
             "NAME/unknown", bool (k,), and "NAME/known_score" float32 (k,)
    labels   "NAME/probabilities" float32 (k, c) and "NAME/labels", bool (k, c),
             whether a label is at or above its threshold
    values   "NAME/values", float64 (k, c), in their units

  and "features" if there are any.
  """
  found: dict[str, np.ndarray] = {}
  for name, logits in predictions.logits.items():
    kind, activated = predictions.kind(name), predictions.activated(name)
    found[f"{name}/logits"] = logits
    columns = kind.kind.columns(
      kind, predictions.class_names(name), activated, top
    )
    columns |= predictions.rejection(name)
    found |= {f"{name}/{column}": rows for column, rows in columns.items()}
  if predictions.features is not None:
    found["features"] = predictions.features
  return found


def joined(
  kept: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Both, or `DataError` if they share a name."""
  if twice := sorted(kept.keys() & made.keys()):
    raise DataError(
      f"the columns have {brief(name_list(twice))}, which the predictions are "
      "called: expected other names."
    )
  return {**kept, **made}

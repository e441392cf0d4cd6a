"""Columns, {name: NumPy array}: images as input, predictions as output.

`map_batches` of Ray Data passes and accepts batches in this form.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.errors import DataError
from memory_vit.prediction.predictions import Predictions
from memory_vit.runtime.messages import brief, name_list

# Names of columns that may hold images, in order of preference.
IMAGE_COLUMNS = ("pixels", "image", "path")


def image_column(columns: Mapping[str, Any]) -> str:
  """Return the name of the column that holds the images."""
  for name in IMAGE_COLUMNS:
    if name in columns:
      return name
  raise DataError(
    "no column holds images: the columns are "
    f"{brief(name_list(list(map(str, columns))))}. Expected a column 'image' "
    "(bytes of files, or uint8 arrays), 'path' or 'pixels' (prepared images)."
  )


def passed_through(
  columns: Mapping[str, Any], read: str
) -> dict[str, np.ndarray]:
  """Return the columns except `read`; a column "path" is always returned."""
  return {
    name: column
    for name, column in columns.items()
    if name != read or name == "path"
  }


def prediction_columns(
  predictions: Predictions, top: int
) -> dict[str, np.ndarray]:
  """Return predictions for k images as columns of k rows.

  For each task NAME, a column "NAME/logits", float32 (k, c), and by its kind

    classes  "NAME/probabilities" float32 (k, c), "NAME/top_indices" int32 (k,
             top), "NAME/top_probabilities" float32 (k, top) and
             "NAME/top_classes", text (k, top); if the task rejects images,
             "NAME/unknown", bool (k,), and "NAME/known_score" float32 (k,)
    labels   "NAME/probabilities" float32 (k, c) and "NAME/labels", bool (k, c),
             whether a label is at or above its threshold
    values   "NAME/values", float64 (k, c), in their units

  and a column "features" if features were requested.
  """
  result: dict[str, np.ndarray] = {}
  for name, logits in predictions.logits.items():
    kind, activated = predictions.kind(name), predictions.activated(name)
    result[f"{name}/logits"] = logits
    columns = kind.kind.columns(
      kind, predictions.class_names(name), activated, top
    )
    columns |= predictions.rejection(name)
    result |= {f"{name}/{column}": rows for column, rows in columns.items()}
  if predictions.features is not None:
    result["features"] = predictions.features
  return result


def joined(
  kept: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Return all columns; raise `DataError` if `kept` and `made` share a name."""
  if twice := sorted(kept.keys() & made.keys()):
    raise DataError(
      f"the input and the predictions both have columns named "
      f"{brief(name_list(twice))}: rename these columns of the input."
    )
  return {**kept, **made}

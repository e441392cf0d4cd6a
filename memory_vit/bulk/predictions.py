"""Predict images as rows: classes, labels or values of tasks, and logits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pyarrow as pa

from memory_vit.bulk.make_shards import image_reader
from memory_vit.errors import ConfigError, TaskError
from memory_vit.model.task import BACKBONE, TaskSpec
from memory_vit.prediction.answers import class_label
from memory_vit.prediction.config import PredictorConfig
from memory_vit.prediction.predictions import Predictions
from memory_vit.prediction.predictor import Predictor

# The columns of a task, beside those of values.
_COLUMNS = {
  "classes": ("top_classes", "top_indices", "top_probabilities"),
  "labels": ("labels", "label_indices", "label_probabilities"),
}
# Their fields of `Guess`, and types.
_GUESS = {
  "class_name": pa.list_(pa.string()),
  "index": pa.list_(pa.int32()),
  "probability": pa.list_(pa.float32()),
}


@dataclasses.dataclass(frozen=True)
class PredictionJob:
  """A prediction of images; it can be pickled, and opened in another process.

  Attributes:
    config: of the predictor, with one of `batch_sizes`: the bits of a row
      depend on the shape of its batch.
    top: classes of each task of classes, the most probable first; fewer if it
      has fewer.
    logits: whether all outputs of the heads are written too.
    original: whether the outputs of the backbone's own head are written, as of
      a task called "backbone".
  """

  config: PredictorConfig
  top: int = 5
  logits: bool = False
  original: bool = False

  @property
  def batch_size(self) -> int:
    """Images per pass."""
    [size] = self.config.batch_sizes
    return size

  def open(self) -> PredictionModel:
    """Load the model; nothing is compiled yet.

    Raises:
      MemoryVitError: for files that cannot be read, or do not fit together.
    """
    return PredictionModel(self, Predictor(self.config, warm_up=False))


class PredictionModel:
  """A predictor that makes rows; see `make_shards.Model`.

  Its columns are, for each task NAME, by its kind

    classes  "NAME/top_classes", "NAME/top_indices", "NAME/top_probabilities"
    labels   "NAME/labels", "NAME/label_indices", "NAME/label_probabilities": of
             the labels at or above their thresholds
    values   "NAME/values/VALUE" for each value, in its unit; values whose names
             are not unique are called by their index

  and "NAME/logits" on request.
  """

  def __init__(self, job: PredictionJob, predictor: Predictor) -> None:
    """The predictor must keep its tasks."""
    self._job, self._predictor = job, predictor
    self._task_set = task_set = predictor.task_set
    if not task_set.names:
      raise TaskError("there is no task to predict with: give one by --task.")
    backbone = predictor.backbone
    if job.original and not backbone.config.num_classes:
      raise ConfigError(
        f"--original: the backbone {job.config.backbone} has no head."
      )
    original = (BACKBONE,) if job.original else ()
    self._names = (*original, *(spec.name for spec in task_set.specs))
    self.preprocessing = task_set.preprocessing
    self.images = image_reader(
      job.config.memory_mib, job.batch_size, backbone.config.image_size
    )
    fields = [self._fields(name) for name in self._names]
    self.schema = pa.schema([*itertools.chain.from_iterable(fields)])
    self.facts: dict[str, Any] = {
      "rows": "predictions",
      "backbone": dataclasses.asdict(backbone.id),
      "dtype": backbone.config.dtype,
      "preprocessing": dataclasses.asdict(predictor.preprocessing),
      "tasks": [*map(dataclasses.asdict, task_set.describe())],
      "top": job.top,
      "logits": job.logits,
      "original": job.original,
    }

  def columns(self, pixels: np.ndarray) -> list[pa.Array]:
    predictions = self._predictor.predict_pixels(
      pixels, task_set=self._task_set, original=self._job.original
    )
    return [
      array for name in self._names for array in self._arrays(predictions, name)
    ]

  def _fields(self, name: str) -> list[pa.Field]:
    """The columns of a task."""
    kind = self._task_set.kind(name)
    if kind.is_values:
      values = _value_names(self._task_set.spec(name))
      fields = [pa.field(f"{name}/values/{v}", pa.float64()) for v in values]
    else:
      columns = zip(_COLUMNS[kind.name], _GUESS.values(), strict=True)
      fields = [pa.field(f"{name}/{column}", of) for column, of in columns]
    if self._job.logits:
      fields.append(pa.field(f"{name}/logits", pa.list_(pa.float32())))
    return fields

  def _arrays(self, predictions: Predictions, name: str) -> list[pa.Array]:
    """The values of `_fields`."""
    kind = predictions.kind(name)
    if kind.is_values:
      found = [pa.array(column) for column in predictions.values(name).T]
    else:
      guesses = (
        predictions.labels(name)
        if kind.is_labels
        else predictions.top(name, self._job.top)
      )
      found = [
        pa.array([[getattr(g, field) for g in row] for row in guesses], of)
        for field, of in _GUESS.items()
      ]
    if self._job.logits:
      is_task = name != BACKBONE
      logits = predictions.logits[name] if is_task else predictions.original
      found.append(_lists(np.asarray(logits), pa.float32()))
    return found


def _value_names(spec: TaskSpec) -> list[str]:
  """Names of columns, which must differ."""
  names = spec.class_names
  unique = len({*names}) == len(names)
  known = names if unique else ()
  return [class_label(known, i) for i in range(spec.num_classes)]


def _lists(values: np.ndarray, kind: pa.DataType) -> pa.Array:
  """Values (b, k) as b lists of k.

  Not of a fixed size: pyarrow 24 cannot write such a list that is null.
  """
  b, k = values.shape
  ends = pa.array(np.arange(b + 1, dtype=np.int32) * k)
  return pa.ListArray.from_arrays(ends, pa.array(values.ravel(), kind))

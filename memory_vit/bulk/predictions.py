"""Predict images into rows: classes, labels or values of tasks, and logits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pyarrow as pa

from memory_vit.bulk.make_shards import image_reader
from memory_vit.errors import ConfigError, TaskError
from memory_vit.kinds.task_kind import REJECTION_TYPES
from memory_vit.model.task import BACKBONE
from memory_vit.prediction.config import PredictorConfig
from memory_vit.prediction.predictions import Predictions
from memory_vit.prediction.predictor import Predictor

# {name of a type, as returned by `Kind.cell_types`: Arrow type}.
_TYPES = {
  "bool": pa.bool_(),
  "float32": pa.float32(),
  "float64": pa.float64(),
  "[string]": pa.list_(pa.string()),
  "[int32]": pa.list_(pa.int32()),
  "[float32]": pa.list_(pa.float32()),
}


@dataclasses.dataclass(frozen=True)
class PredictionJob:
  """A job that predicts images; it can be pickled for another process.

  Attributes:
    config: configuration of the predictor, with a single batch size, because
      the last bits of a row depend on the shape of its batch.
    top: maximum number of classes for a task, the most probable first.
    logits: whether all outputs of the heads are written, too.
    original: whether the outputs of the backbone's original head are written,
      too, in the columns of a task called "backbone".
  """

  config: PredictorConfig
  top: int = 5
  logits: bool = False
  original: bool = False

  @property
  def batch_size(self) -> int:
    """Number of images per pass."""
    [size] = self.config.batch_sizes
    return size

  def open(self) -> PredictionModel:
    """Load the model; nothing is compiled yet.

    Raises:
      MemoryVitError: if backbone or tasks cannot be read or combined.
    """
    return PredictionModel(self, Predictor(self.config, warm_up=False))


class PredictionModel:
  """A predictor that makes rows; see `make_shards.Model`.

  Its columns for a task NAME depend on the kind of the task:

    classes  "NAME/top_classes", "NAME/top_indices", "NAME/top_probabilities";
             if the task rejects images, "NAME/unknown", "NAME/known_score"
    labels   "NAME/labels", "NAME/label_indices", "NAME/label_probabilities",
             for the labels at or above their thresholds
    values   "NAME/values/VALUE" for each value, in its unit; if names of values
             are not unique, VALUE is an index

  and "NAME/logits" on request.
  """

  def __init__(self, job: PredictionJob, predictor: Predictor) -> None:
    """Use the tasks that `predictor` has now; later changes have no effect."""
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
      "preprocessing": dataclasses.asdict(task_set.preprocessing),
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
    """Return the names and types of a task's columns."""
    fields = [
      pa.field(f"{name}/{column}", _TYPES[kind])
      for column, kind in self._types(name).items()
    ]
    if self._job.logits:
      fields.append(pa.field(f"{name}/logits", pa.list_(pa.float32())))
    return fields

  def _types(self, name: str) -> dict[str, str]:
    spec = None if name == BACKBONE else self._task_set.spec(name)
    stated = self._task_set.kind(name)
    if spec is None:
      return stated.kind.cell_types((), 0)
    types = stated.kind.cell_types(spec.class_names, spec.num_classes)
    return types | ({} if stated.unknown is None else REJECTION_TYPES)

  def _arrays(self, predictions: Predictions, name: str) -> list[pa.Array]:
    """Return the values of a task's columns, in the order of `_fields`."""
    kind, names = predictions.kind(name), predictions.class_names(name)
    cells: dict[str, Any] = {
      **kind.kind.cells(
        kind, names, predictions.activated(name), self._job.top
      ),
      **predictions.rejection(name),
    }
    types = self._types(name)
    arrays = [
      pa.array(cells[column], _TYPES[types[column]]) for column in types
    ]
    if self._job.logits:
      is_task = name != BACKBONE
      logits = predictions.logits[name] if is_task else predictions.original
      arrays.append(_lists(np.asarray(logits), pa.float32()))
    return arrays


def _lists(values: np.ndarray, kind: pa.DataType) -> pa.Array:
  """Return values (b, k) as b lists of k values.

  The lists have variable size, because pyarrow 24 cannot write nulls in a
  column of lists of fixed size.
  """
  b, k = values.shape
  ends = pa.array(np.arange(b + 1, dtype=np.int32) * k)
  return pa.ListArray.from_arrays(ends, pa.array(values.ravel(), kind))

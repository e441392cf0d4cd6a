"""An evaluation of a task on a split, with the content of its report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from memory_vit.errors import TaskError
from memory_vit.evaluation import classification, confusion, task_data
from memory_vit.evaluation.calibration import Calibration, calibrate
from memory_vit.evaluation.classification import ClassMetrics, SplitMetrics
from memory_vit.evaluation.split_predictions import SplitPredictions
from memory_vit.images.view import to_levels
from memory_vit.version import __version__

if TYPE_CHECKING:  # it brings TensorFlow
  from memory_vit.data.data_files import DataFiles
  from memory_vit.data.split import Split
  from memory_vit.model.task import Task

SHOWN_IMAGES = 24
# Pixels of a side, at most, and images that are read at a time: 200 images of
# 2,048 pixels would take 10 GB.
_THUMBNAIL, _AT_ONCE = 320, 8


@dataclasses.dataclass(frozen=True)
class Mistake:
  """A wrong prediction; `file` is "" if its example has none."""

  example: int
  file: str
  label: str
  predicted: str
  confidence: float


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskEvaluation:
  """An evaluation of a task on a split.

  Attributes:
    task: its name.
    data: name of the data set.
    directory: the last part of its directory if `data` says only that it is
      one; else "".
    split: of the data set.
    class_names: of all c classes.
    predictions: for all examples of the split.
    file_name: number of an example -> the file it comes from, or "".
    read_images: numbers of k examples -> float32 (k, side, side, 3) in [-1, 1].
    shown_images: the number of mistakes that are shown with their image.
    details: JSON values on the task, its backbone, and the version.
    alone: the comparison with the task alone, see `Evaluator.evaluate`; None if
      it was not compared.
    data_files: the files of the split; None if unknown.
  """

  task: str
  data: str
  split: str
  class_names: tuple[str, ...]
  predictions: SplitPredictions
  file_name: Callable[[int], str]
  read_images: Callable[[Sequence[int]], np.ndarray]
  shown_images: int = SHOWN_IMAGES
  details: Mapping[str, Any]
  alone: Mapping[str, Any] | None = None
  directory: str = ""
  data_files: DataFiles | None = None

  @classmethod
  def of(
    cls,
    task: Task,
    split: Split,
    predictions: SplitPredictions,
    *,
    dtype: str = "float32",
    shown_images: int = SHOWN_IMAGES,
    alone: Mapping[str, Any] | None = None,
  ) -> TaskEvaluation:
    """The evaluation of a task on a split.

    Args:
      task: that was evaluated.
      split: the examples; no image is shown of embeddings.
      predictions: for its examples.
      dtype: compute dtype.
      shown_images: see the attributes, as `alone`.
      alone: see the attributes.

    Raises:
      TaskError: for a data set of other classes than those of the task.
    """
    from memory_vit.data.batching import eval_images

    spec = task.spec
    if spec.class_names:
      task_data.require_classes(task, split)
    for classes in (spec.num_classes, predictions.num_classes):
      if classes != split.num_classes:
        raise TaskError(
          f"task {task.name!r} has {spec.num_classes:,} classes, its "
          f"predictions {predictions.num_classes:,}, and the data set "
          f"{split.name!r} {split.num_classes:,}: expected the same."
        )
    return cls(
      task=spec.name,
      data=split.name,
      split=split.split,
      class_names=split.class_names,
      predictions=predictions,
      file_name=split.file_name,
      read_images=functools.partial(eval_images, split, spec.evaluation),
      shown_images=0 if split.embedded else shown_images,
      details={
        "memory_vit": __version__,
        "task": {
          "name": spec.name,
          "digest": task.digest,
          "regime": spec.regime,
          "cells": spec.cells,
          "attends_to": list(spec.attends_to),
        },
        "backbone": {**dataclasses.asdict(spec.backbone), "dtype": dtype},
        "preprocessing": dataclasses.asdict(spec.evaluation),
      },
      alone=alone,
      directory=split.directory,
      data_files=split.data_files,
    )

  @property
  def data_shown(self) -> str:
    """The name of the data set for people: "digits", "folder pets"."""
    return f"{self.data} {self.directory}".rstrip()

  @functools.cached_property
  def data_digest(self) -> str | None:
    """Digest of names and sizes of its files, and of other known facts.

    None if nothing is known of them.
    """
    known = self.data_files
    return known.sizes() if known and (known.files or known.facts) else None

  @functools.cached_property
  def classes(self) -> ClassMetrics:
    """Metrics of each class."""
    return classification.class_metrics(self.predictions)

  @functools.cached_property
  def metrics(self) -> SplitMetrics:
    """Metrics over all examples."""
    return classification.split_metrics(self.predictions, self.classes)

  @functools.cached_property
  def confusion(self) -> Any:
    """See `confusion.confusion_matrix`."""
    return confusion.confusion_matrix(self.predictions)

  @functools.cached_property
  def calibration(self) -> Calibration:
    """Calibration, on the examples that have a prediction."""
    predicted = self.predictions.predicted
    return calibrate(
      self.predictions.confidence[predicted],
      self.predictions.correct[predicted],
    )

  @functools.cached_property
  def mistakes(self) -> tuple[Mistake, ...]:
    """The most confident mistakes, `shown_images` at most."""
    numbers = self.predictions.mistakes[: self.shown_images]
    return tuple(self.mistake(int(number)) for number in numbers)

  def read_mistakes(self) -> np.ndarray:
    """Read the images of `mistakes`, uint8 (k, side, side, 3).

    They are scaled down to at most 320 pixels a side, and are not cached.
    """
    numbers = [mistake.example for mistake in self.mistakes]
    parts = [
      _thumbnails(self.read_images(numbers[i : i + _AT_ONCE]))
      for i in range(0, len(numbers), _AT_ONCE)
    ]
    return np.concatenate(parts or [np.zeros((0, 1, 1, 3), np.uint8)])

  def mistake(self, number: int) -> Mistake:
    """Describe the wrong prediction for an example."""
    predictions = self.predictions
    return Mistake(
      example=number,
      file=self.file_name(number),
      label=self.class_names[predictions.label[number]],
      predicted=self.class_names[predictions.top_classes[number, 0]],
      confidence=float(predictions.confidence[number]),
    )


def _thumbnails(images: np.ndarray) -> np.ndarray:
  """Images (k, side, side, 3) in [-1, 1] as uint8, of a smaller side."""
  side = min(images.shape[1], _THUMBNAIL)
  return np.stack([
    np.asarray(
      Image.fromarray(to_levels(image)).resize(
        (side, side), Image.Resampling.LANCZOS
      )
    )
    for image in images
  ])  # fmt: skip

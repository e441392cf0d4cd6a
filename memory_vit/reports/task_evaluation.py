"""Evaluation of a task on a split, with the content of its report."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from memory_vit.errors import TaskError
from memory_vit.evaluation import task_data
from memory_vit.images.view import to_levels
from memory_vit.kinds.calibration import Calibration
from memory_vit.kinds.class_metrics import ClassMetrics
from memory_vit.kinds.label_metrics import LabelMetrics
from memory_vit.kinds.predictions import (
  LabelPredictions,
  SplitPredictions,
  ValuePredictions,
)
from memory_vit.kinds.scores import Evaluation
from memory_vit.kinds.value_metrics import ValueMetrics
from memory_vit.reports.document import Number, percent
from memory_vit.reports.markup import Html
from memory_vit.version import __version__

if TYPE_CHECKING:  # these imports load TensorFlow and matplotlib
  from pathlib import Path

  from matplotlib.figure import Figure

  from memory_vit.data.data_files import DataFiles
  from memory_vit.data.split import Split
  from memory_vit.model.task import Task

SHOWN_IMAGES = 24
# Maximum side of a thumbnail in pixels, and number of images to read at once.
# A page may show 200 images. Reading all at once could take 10 GB: before they
# are scaled down, images have up to 2,048 pixels a side.
_THUMBNAIL, _AT_ONCE = 320, 8


@dataclasses.dataclass(frozen=True)
class Mistake:
  """Wrong prediction for an example; `file` is "" if the example has no file.

  `note` is the confidence of the prediction, or the error of a value.
  """

  example: int
  file: str
  label: str
  predicted: str
  note: str


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskEvaluation(abc.ABC):
  """Evaluation of a task on a split; `of` creates the subclass for the kind.

  Attributes:
    task: name of the task.
    data: name of the data set.
    directory: name of the data set's folder if `data` is a generic name, such
      as "folder"; else "".
    split: name of the split.
    class_names: names of all c classes, labels or values.
    predictions: predictions for all examples of the split.
    file_name: number of an example -> the file it comes from, or "".
    read_images: numbers of k examples -> float32 (k, side, side, 3) in [-1, 1].
    shown_images: maximum number of mistakes that are shown with their images.
    details: JSON values on the task, its backbone, and the version.
    alone: comparison with the outputs of the task evaluated alone, see
      `Evaluator.evaluate`; None if they were not compared.
    data_files: the files of the split; None if unknown.
  """

  task: str
  data: str
  split: str
  class_names: tuple[str, ...]
  predictions: SplitPredictions | LabelPredictions | ValuePredictions
  file_name: Callable[[int], str]
  read_images: Callable[[Sequence[int]], np.ndarray]
  shown_images: int = SHOWN_IMAGES
  details: Mapping[str, Any]
  alone: Mapping[str, Any] | None = None
  directory: str = ""
  data_files: DataFiles | None = None
  kind: ClassVar[str]
  noun: ClassVar[str]
  worst_title: ClassVar[str] = "Most confident mistakes"  # title above mistakes
  in_index: ClassVar[tuple[str, ...]]  # titles of metrics that the index shows
  meanings: ClassVar[Mapping[str, str]]  # {title: meaning} of all numbers
  confidence: ClassVar[str] = ""  # x label of the calibration figure

  @staticmethod
  def of(
    task: Task,
    split: Split,
    predictions: SplitPredictions | LabelPredictions | ValuePredictions,
    *,
    dtype: str = "float32",
    shown_images: int = SHOWN_IMAGES,
    alone: Mapping[str, Any] | None = None,
  ) -> TaskEvaluation:
    """Create the evaluation of a task on a split.

    Args:
      task: the evaluated task.
      split: the split; no images are shown if it has embeddings.
      predictions: predictions of the task for all examples of the split.
      dtype: compute dtype.
      shown_images: see the attributes of the class.
      alone: see the attributes of the class.

    Raises:
      TaskError: if the data set is of another kind, or has other classes.
    """
    from memory_vit.data.batching import eval_images
    from memory_vit.reports.pages import PAGES

    spec = task.spec
    if spec.class_names:
      task_data.require_classes(task, split)
    expected = spec.kind.name, spec.num_classes, spec.num_classes
    actual = split.kind, split.num_classes, predictions.num_classes
    if actual != expected:
      raise TaskError(
        f"task {task.name!r} has {spec.num_classes:,} {spec.kind.name}, the "
        f"predictions have {predictions.num_classes:,}, and the data set "
        f"{split.name!r} has {split.num_classes:,} {split.kind}: expected the "
        "same number and kind."
      )
    return PAGES[spec.kind.name](
      task=spec.name,
      data=split.name,
      split=split.split,
      class_names=split.class_names,
      predictions=predictions,
      file_name=split.file_name,
      read_images=functools.partial(eval_images, split, spec.preprocessing),
      shown_images=0 if split.embedded else shown_images,
      details={
        "memory_vit": __version__,
        "task": {
          "name": spec.name,
          "kind": dataclasses.asdict(spec.kind),
          "digest": task.digest,
          "regime": spec.regime,
          "cells": spec.cells,
          "attends_to": list(spec.attends_to),
        },
        "backbone": {**dataclasses.asdict(spec.backbone), "dtype": dtype},
        "preprocessing": dataclasses.asdict(spec.preprocessing),
      },
      alone=alone,
      directory=split.directory,
      data_files=split.data_files,
    )

  @property
  def data_shown(self) -> str:
    """Name of the data set as the report shows it: "digits", "folder pets"."""
    return f"{self.data} {self.directory}".rstrip()

  @functools.cached_property
  def data_digest(self) -> str | None:
    """Digest of the data's facts, file names and sizes; None if unknown."""
    files = self.data_files
    return files.sizes() if files and (files.files or files.facts) else None

  def show_score(self, score: float | None) -> str:
    """Return a score as text."""
    return percent(score)

  @abc.abstractmethod
  def numbers(self) -> list[Number]:
    """Return the metrics over all examples, including those of `in_index`."""

  @abc.abstractmethod
  def sections(
    self, plots: Mapping[str, bytes]
  ) -> dict[str, tuple[str, list[Html]]]:
    """Return the sections of the page as {anchor: (title, content)}."""

  @abc.abstractmethod
  def figures(self) -> dict[str, Figure]:
    """Return the figures of the kind, by file name without ".png"."""

  @abc.abstractmethod
  def write_predictions(self, folder: Path) -> None:
    """Write the tables of all predictions."""

  @property
  def each_columns(self) -> Mapping[str, Sequence[str]]:
    """Columns of the table of `each` that are not metrics."""
    return {}

  @property
  @abc.abstractmethod
  def each(self) -> ClassMetrics | LabelMetrics | ValueMetrics:
    """Metrics of each class, label or value."""

  @property
  @abc.abstractmethod
  def summary(self) -> Mapping[str, Any]:
    """Metrics over all examples by name, with "examples" and "skipped"."""

  @property
  @abc.abstractmethod
  def calibration(self) -> Calibration | None:
    """Calibration on the examples that have a prediction; None for values."""

  @property
  def worst(self) -> np.ndarray:
    """Numbers of the examples with a wrong prediction, the worst first."""
    errors = self._errors.max(axis=1)
    wrong = np.flatnonzero(errors)
    return wrong[np.argsort(-errors[wrong], kind="stable")]

  @property
  def _errors(self) -> np.ndarray:
    """Errors (examples, outputs); 0 where a prediction is right or missing."""
    raise NotImplementedError  # subclasses override this or `worst`

  def mistake(self, number: int) -> Mistake:
    """Describe the wrong prediction for an example."""
    label, predicted, note = self._mistake_texts(number)
    return Mistake(number, self.file_name(number), label, predicted, note)

  @abc.abstractmethod
  def _mistake_texts(self, number: int) -> tuple[str, str, str]:
    """Return `label`, `predicted` and `note` of an example's `Mistake`."""

  @functools.cached_property
  def mistakes(self) -> tuple[Mistake, ...]:
    """The worst mistakes, at most `shown_images`."""
    numbers = self.worst[: self.shown_images]
    return tuple(self.mistake(int(number)) for number in numbers)

  def read_mistakes(self) -> np.ndarray:
    """Read the images of `mistakes`, uint8 (k, side, side, 3).

    The images are scaled down to at most 320 pixels a side, and not cached.
    """
    numbers = [mistake.example for mistake in self.mistakes]
    parts = [
      _thumbnails(self.read_images(numbers[i : i + _AT_ONCE]))
      for i in range(0, len(numbers), _AT_ONCE)
    ]
    return np.concatenate(parts or [np.zeros((0, 1, 1, 3), np.uint8)])


def overall(evaluation: TaskEvaluation, found: Evaluation) -> Mapping[str, Any]:
  """Return {name: value} of the loss, the metrics and the example counts."""
  scores = found.scores
  return {
    "loss": scores.loss,
    **scores.metrics,
    "examples": scores.examples,
    "not_finite": scores.not_finite,
    "skipped": int((~evaluation.predictions.counted).sum()),
  }


def _thumbnails(images: np.ndarray) -> np.ndarray:
  """Scale down images (k, side, side, 3) in [-1, 1]; return them as uint8."""
  side = min(images.shape[1], _THUMBNAIL)
  return np.stack([
    np.asarray(
      Image.fromarray(to_levels(image)).resize(
        (side, side), Image.Resampling.LANCZOS
      )
    )
    for image in images
  ])  # fmt: skip

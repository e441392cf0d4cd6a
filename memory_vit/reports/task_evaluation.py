"""An evaluation of a task on a split, with the content of its report."""

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

if TYPE_CHECKING:  # it brings TensorFlow, or matplotlib
  from pathlib import Path

  from matplotlib.figure import Figure

  from memory_vit.data.data_files import DataFiles
  from memory_vit.data.split import Split
  from memory_vit.model.task import Task

SHOWN_IMAGES = 24
# Pixels of a side, at most, and images that are read at a time: 200 images of
# 2,048 pixels would take 10 GB.
_THUMBNAIL, _AT_ONCE = 320, 8


@dataclasses.dataclass(frozen=True)
class Mistake:
  """A wrong prediction; `file` is "" if its example has none.

  `note` says how wrong: the confidence, or the error of a value.
  """

  example: int
  file: str
  label: str
  predicted: str
  note: str


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskEvaluation(abc.ABC):
  """An evaluation of a task on a split; `of` makes that of a kind.

  Attributes:
    task: its name.
    data: name of the data set.
    directory: the last part of its directory if `data` says only that it is
      one; else "".
    split: of the data set.
    class_names: of all c classes, labels or values.
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
  # Titles on the page of a kind, and what its numbers mean.
  worst_title: ClassVar[str] = "Most confident mistakes"
  in_index: ClassVar[tuple[str, ...]]
  meanings: ClassVar[Mapping[str, str]]
  confidence: ClassVar[str] = ""  # what the calibration is of

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
    """The evaluation of a task on a split.

    Args:
      task: that was evaluated.
      split: the examples; no image is shown of embeddings.
      predictions: for its examples.
      dtype: compute dtype.
      shown_images: see the attributes, as `alone`.
      alone: see the attributes.

    Raises:
      TaskError: for a data set of another kind, or of other classes than those
        of the task.
    """
    from memory_vit.data.batching import eval_images
    from memory_vit.reports.pages import PAGES

    spec = task.spec
    if spec.class_names:
      task_data.require_classes(task, split)
    expected = spec.kind.name, spec.num_classes, spec.num_classes
    found = split.kind, split.num_classes, predictions.num_classes
    if found != expected:
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
    """The name of the data set for people: "digits", "folder pets"."""
    return f"{self.data} {self.directory}".rstrip()

  @functools.cached_property
  def data_digest(self) -> str | None:
    """Digest of names and sizes of its files, and of other known facts.

    None if nothing is known of them.
    """
    known = self.data_files
    return known.sizes() if known and (known.files or known.facts) else None

  def show_score(self, score: float | None) -> str:
    """A score for people."""
    return percent(score)

  @abc.abstractmethod
  def numbers(self) -> list[Number]:
    """The numbers over all examples, those of `in_index` among them."""

  @abc.abstractmethod
  def sections(
    self, plots: Mapping[str, bytes]
  ) -> dict[str, tuple[str, list[Html]]]:
    """{anchor: (title, content)} of the page."""

  @abc.abstractmethod
  def figures(self) -> dict[str, Figure]:
    """The figures of the kind, by the names of their files."""

  @abc.abstractmethod
  def write_predictions(self, folder: Path) -> None:
    """Write the tables of all predictions."""

  @property
  def each_columns(self) -> Mapping[str, Sequence[str]]:
    """Columns of the table of `each`, beside its metrics."""
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
    """Calibration, on the examples that have a prediction; None of values."""

  @property
  def worst(self) -> np.ndarray:
    """Numbers of the examples with a wrong prediction, the worst first."""
    errors = self._errors.max(axis=1)
    wrong = np.flatnonzero(errors)
    return wrong[np.argsort(-errors[wrong], kind="stable")]

  @property
  def _errors(self) -> np.ndarray:
    """How wrong each output is, (n, c); 0 if right, or without a prediction."""
    raise NotImplementedError  # only if `worst` is not overridden

  def mistake(self, number: int) -> Mistake:
    """Describe the wrong prediction for an example."""
    label, predicted, note = self._mistake_texts(number)
    return Mistake(number, self.file_name(number), label, predicted, note)

  @abc.abstractmethod
  def _mistake_texts(self, number: int) -> tuple[str, str, str]:
    """What is right, what is predicted, and the note."""

  @functools.cached_property
  def mistakes(self) -> tuple[Mistake, ...]:
    """The worst mistakes, `shown_images` at most."""
    numbers = self.worst[: self.shown_images]
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


def overall(evaluation: TaskEvaluation, found: Evaluation) -> Mapping[str, Any]:
  """The numbers over all examples, by name."""
  scores = found.scores
  return {
    "loss": scores.loss,
    **scores.metrics,
    "examples": scores.examples,
    "not_finite": scores.not_finite,
    "skipped": int((~evaluation.predictions.counted).sum()),
  }


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

"""Figures of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memory_vit import plots
from memory_vit.evaluation import labels
from memory_vit.reports.task_evaluation import (
  ClassEvaluation,
  LabelEvaluation,
  TaskEvaluation,
  ValueEvaluation,
)
from memory_vit.runtime.messages import escaped

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_MOST_CURVES = 10
_CONFIDENCE = {
  "classes": "confidence, in the predicted class",
  "labels": "probability of a label",
}


def figures(
  evaluation: TaskEvaluation, images: np.ndarray | None = None
) -> dict[str, Figure]:
  """Draw {"confusion_matrix", "calibration", "mistakes"} of classes.

  Of labels "precision_recall" takes the place of the first, of values "scatter"
  of the first two. The last shows the worst mistakes as images; it is left out
  if `shown_images` is 0.

  Args:
    evaluation: of a task.
    images: from `evaluation.read_mistakes()`; by default they are read.

  Raises:
    BrokenDataError: if such an image cannot be read any more.
  """
  drawn: dict[str, Figure] = {}
  if isinstance(evaluation, ClassEvaluation):
    drawn["confusion_matrix"] = plots.confusion_matrix_figure(
      evaluation.confusion, evaluation.class_names
    )
  elif isinstance(evaluation, LabelEvaluation):
    drawn["precision_recall"] = _curves(evaluation)
  elif isinstance(evaluation, ValueEvaluation):
    found = evaluation.predictions
    some = found.has_prediction
    drawn["scatter"] = plots.scatter_figure(
      found.target[some], found.predicted[some], evaluation.class_names,
      found.kind.units,
    )  # fmt: skip
  if evaluation.calibration:
    drawn["calibration"] = plots.calibration_figure(
      evaluation.calibration, confidence=_CONFIDENCE[evaluation.kind]
    )
  if evaluation.shown_images:
    images = evaluation.read_mistakes() if images is None else images
    titles = [
      f"{escaped(mistake.label)}\nas: {escaped(mistake.predicted)}\n"
      f"{escaped(mistake.note)}"
      for mistake in evaluation.mistakes
    ]
    drawn["mistakes"] = plots.mistakes_sheet(images, titles)
  return drawn


def _curves(evaluation: LabelEvaluation) -> Figure:
  """Of the labels with the lowest average precision."""
  average = evaluation.each.average_precision
  # NaN is sorted last.
  lowest = np.argsort(average, kind="stable")[:_MOST_CURVES]
  shown = [i for i in lowest if not np.isnan(average[i])]
  return plots.precision_recall_figure(
    [labels.curve(evaluation.predictions, int(i)) for i in shown],
    [f"{evaluation.class_names[i]} ({100 * average[i]:.0f} %)" for i in shown],
  )

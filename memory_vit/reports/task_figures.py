"""Figures of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memory_vit import plots
from memory_vit.reports.task_evaluation import TaskEvaluation
from memory_vit.runtime.messages import escaped

if TYPE_CHECKING:
  from matplotlib.figure import Figure


def figures(
  evaluation: TaskEvaluation, images: np.ndarray | None = None
) -> dict[str, Figure]:
  """Draw the figures of an evaluation, by name.

  They are "confusion_matrix" and "calibration" for classes, "precision_recall"
  and "calibration" for labels, and "scatter" for values. Unless `shown_images`
  is 0, "mistakes" shows the images of the worst mistakes.

  Args:
    evaluation: evaluation of a task.
    images: result of `evaluation.read_mistakes()`, which is called by default.

  Raises:
    BrokenDataError: if an image of a mistake can no longer be read.
  """
  drawn = evaluation.figures()
  if evaluation.calibration:
    drawn["calibration"] = plots.calibration_figure(
      evaluation.calibration, confidence=evaluation.confidence
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

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

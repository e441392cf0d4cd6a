"""Figures for notebooks, reports and TensorBoard.

Figures are made without `pyplot`, so that no global list keeps them in memory,
and a notebook shows a figure only once, below the cell that returns it.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.plots.evaluation import (
    calibration_figure,
    confusion_matrix_figure,
    mistakes_sheet,
    precision_recall_figure,
    scatter_figure,
  )
  from memory_vit.plots.images import image_grid
  from memory_vit.plots.predictions import prediction_grid
  from memory_vit.plots.runs import Scalars, read_scalars, training_curves
  from memory_vit.plots.sweeps import Lines, Point, lines_figure, sweep_figure
  from memory_vit.plots.timings import timing_bars

__all__ = [
  "Lines",
  "Point",
  "Scalars",
  "calibration_figure",
  "confusion_matrix_figure",
  "image_grid",
  "lines_figure",
  "mistakes_sheet",
  "precision_recall_figure",
  "prediction_grid",
  "read_scalars",
  "scatter_figure",
  "sweep_figure",
  "timing_bars",
  "training_curves",
]

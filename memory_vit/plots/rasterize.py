"""Figures as pixels, for whatever shows images."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def rasterize(figure: Figure, *, dpi: int = 100) -> np.ndarray:
  """Draw a figure.

  Args:
    figure: is drawn on white.
    dpi: pixels of an inch.

  Returns:
    uint8 (height, width, 3).
  """
  figure.set_dpi(dpi)
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  return np.asarray(canvas.buffer_rgba())[..., :3].copy()

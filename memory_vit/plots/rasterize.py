"""Figures as pixels and as PNG files."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

_DPI = 120
# Pattern of the Matplotlib warning about a letter that is drawn as a box.
_NO_GLYPH = "Glyph .* missing from font"


def rasterize(figure: Figure, *, dpi: int = 100) -> np.ndarray:
  """Return the pixels of a figure, uint8 (height, width, 3), drawn on white."""
  figure.set_dpi(dpi)
  canvas = FigureCanvasAgg(figure)
  with _letters_as_boxes():
    canvas.draw()
  return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def png(figure: Figure) -> bytes:
  """Return a figure as a PNG file."""
  file = io.BytesIO()
  with _letters_as_boxes():
    figure.savefig(file, format="png", dpi=_DPI)
  return file.getvalue()


@contextlib.contextmanager
def _letters_as_boxes() -> Iterator[None]:
  """Log one line about all letters drawn as boxes, not a warning for each."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.filterwarnings("always", _NO_GLYPH)
    yield
  lacking = [w for w in caught if re.match(_NO_GLYPH, str(w.message))]
  if lacking:
    logger.warning(
      "%d letters of a figure are drawn as boxes: its font lacks them",
      len({str(w.message) for w in lacking}),
    )
  for warning in caught:
    if warning not in lacking:
      warnings.showwarning(
        warning.message, warning.category, warning.filename, warning.lineno
      )

"""Image grids: images side by side, as a model sees them."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from memory_vit.errors import DataError
from memory_vit.runtime.messages import escaped

# Characters of a title in an inch, and lines that one of its lines may become.
_CHARACTERS, _LINES = 12.6, 2


def image_grid(
  images: np.ndarray,
  titles: Sequence[str],
  *,
  columns: int = 8,
  width: float = 1.2,
) -> Figure:
  """Images side by side, each under its title, in a figure with b axes.

  Args:
    images: floats (b, side, side, 3) in [-1, 1], as the model takes them, or
      levels, uint8.
    titles: b texts of one or several lines; each line is wrapped, and cut off
      after two.
    columns: the number of images in a row, at most.
    width: of an image with the space around it, in inches.

  Raises:
    DataError: for images of another shape, or another number of titles.
  """
  images = require_images(images)
  if len(titles) != len(images):
    raise DataError(
      f"{len(titles)} titles for {len(images)} images: expected one title for "
      "each image."
    )
  columns = min(columns, len(images))
  rows = -(-len(images) // columns)
  titles = [_wrapped(title, int(width * _CHARACTERS)) for title in titles]
  lines = max(title.count("\n") + 1 for title in titles)
  size = (width * columns, (width + 0.05 + 0.27 * lines) * rows)
  figure = Figure(figsize=size, layout="constrained")
  for i, (image, title) in enumerate(zip(images, titles, strict=True)):
    axes = figure.add_subplot(rows, columns, i + 1)
    # Contrasts are not stretched: the model sees them like this.
    levels = image.dtype == np.uint8
    axes.imshow(image if levels else np.clip((image + 1) / 2, 0, 1))
    # A class name with two dollars is not a formula.
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.set_axis_off()
  return figure


def require_images(images: np.ndarray) -> np.ndarray:
  """An array of at least one image (b, side, side, 3), or `DataError`."""
  images = np.asarray(images)
  if images.ndim != 4 or images.shape[-1] != 3 or not len(images):
    raise DataError(
      f"images have shape {images.shape}, expected (batch, side, side, 3), "
      "with at least one image."
    )
  return images


def _wrapped(title: str, width: int) -> str:
  """Each line of a title, as lines of at most `width` characters."""
  return "\n".join(
    "\n".join(
      textwrap.wrap(escaped(line), width, max_lines=_LINES, placeholder="...")
    )
    for line in title.split("\n")
  )

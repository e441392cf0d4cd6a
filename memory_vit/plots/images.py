"""Image grids: images side by side, as a model sees them."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from memory_vit.errors import DataError
from memory_vit.images.view import to_levels
from memory_vit.runtime.messages import escaped

# Number of characters of a title that fit in an inch. If a line of a title does
# not fit, it is wrapped into at most `_LINES` lines.
_CHARACTERS, _LINES = 12.6, 2


def image_grid(
  images: np.ndarray,
  titles: Sequence[str],
  *,
  columns: int = 8,
  width: float = 1.2,
) -> Figure:
  """Draw images side by side, each under its title, in a figure with b axes.

  Args:
    images: floats (b, side, side, 3) in [-1, 1], as the model takes them, or
      uint8 levels of that shape.
    titles: b texts of one or several lines; a long line is wrapped into two
      lines, and text beyond the second line is cut off.
    columns: maximum number of images in a row.
    width: width of an image with the space around it, in inches.

  Raises:
    DataError: if the shape of the images is wrong, or there are not b titles.
  """
  images = to_pixels(images)
  if len(titles) != len(images):
    raise DataError(
      f"the number of titles is {len(titles)}, expected {len(images)}: one "
      "title for each image."
    )
  columns = min(columns, len(images))
  rows = -(-len(images) // columns)
  titles = [_wrapped(title, int(width * _CHARACTERS)) for title in titles]
  lines = max(title.count("\n") + 1 for title in titles)
  size = (width * columns, (width + 0.05 + 0.27 * lines) * rows)
  figure = Figure(figsize=size, layout="constrained")
  for i, (image, title) in enumerate(zip(images, titles, strict=True)):
    axes = figure.add_subplot(rows, columns, i + 1)
    axes.imshow(image)
    # Do not parse a class name with two dollar signs as a formula.
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.set_axis_off()
  return figure


def to_pixels(images: np.ndarray) -> np.ndarray:
  """Return images as uint8 (b, side, side, 3), or raise `DataError`.

  Floats in [-1, 1] become levels without stretching the contrast, so that
  images look as the model sees them.
  """
  images = np.asarray(images)
  if images.ndim != 4 or images.shape[-1] != 3 or not len(images):
    raise DataError(
      f"images have shape {images.shape}, expected (batch, side, side, 3), "
      "with at least one image."
    )
  return images if images.dtype == np.uint8 else to_levels(images)


def _wrapped(title: str, width: int) -> str:
  """Wrap each line of a title into at most two lines of `width` characters."""
  return "\n".join(
    "\n".join(
      textwrap.wrap(escaped(line), width, max_lines=_LINES, placeholder="...")
    )
    for line in title.split("\n")
  )

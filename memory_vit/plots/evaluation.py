"""Figures of an evaluation: confusions, precision-recall, scatter plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memory_vit.errors import DataError
from memory_vit.kinds.calibration import Calibration
from memory_vit.plots.images import image_grid
from memory_vit.runtime.messages import escaped, shortened

# A confusion matrix shows counts in its cells for up to `_NUMBERED` classes,
# and class names at its axes for up to `_NAMED` classes. For more than
# `_SINGLE` classes, a row stands for several classes.
_NUMBERED, _NAMED, _SINGLE = 16, 40, 400
_LONGEST_NAME = 24
_SHEET_COLUMNS, _SHEET_WIDTH = 6, 1.75  # width in inches
_TITLE_LINES = 3
_PANELS = 6
_DARK, _LIGHT = "#1f4e79", "#e8a33d"


def confusion_matrix_figure(matrix: Any, class_names: Sequence[str]) -> Figure:
  """Draw a confusion matrix.

  A row holds the examples of a class, and the colour of a cell is its share of
  the row. Up to 16 classes, cells also show the number of examples; up to 40,
  axes show class names. More than 400 classes are drawn in groups of neighbors.

  Args:
    matrix: number of examples (c, c) by class (row) and predicted class
      (column); an array, nested lists, or a sparse SciPy array.
    class_names: names of the c classes, c >= 1.

  Raises:
    DataError: if the shape of the matrix is not (c, c).
  """
  if not hasattr(matrix, "tocoo"):
    matrix = np.asarray(matrix)
  classes = len(class_names)
  if not classes or tuple(matrix.shape) != (classes, classes):
    raise DataError(
      f"the confusion matrix has shape {tuple(matrix.shape)}, expected (c, c), "
      f"where c is the number of class names (here {classes}) and at least 1."
    )
  counts, together = _neighbors_together(matrix)
  side = min(9.0, max(3.5, 1.5 + 0.42 * len(counts)))
  figure = Figure(figsize=(side + 1.2, side), layout="constrained")
  axes = figure.subplots()
  total = counts.sum(axis=1, keepdims=True)
  # If a class has no examples, its shares are NaN, and its row shows this grey.
  axes.set_facecolor("0.85")
  shares = np.divide(
    counts, total, out=np.full(counts.shape, np.nan), where=total > 0
  )
  # On a linear scale, rare confusions among many classes would be invisible.
  norm = PowerNorm(1 if classes <= _NUMBERED else 0.4, vmin=0, vmax=1)
  image = axes.imshow(shares, cmap="Blues", norm=norm, interpolation="nearest")
  bar = figure.colorbar(image, ax=axes, shrink=0.8)
  bar.set_label("share of the class")
  bar.set_ticks([0, 0.01, 0.1, 0.5, 1] if norm.gamma < 1 else [0, 0.5, 1])
  bar.ax.set_yticklabels([f"{100 * tick:g} %" for tick in bar.get_ticks()])
  if classes <= _NUMBERED:
    _number_cells(axes, counts, shares)
  _name_classes(axes, class_names, together)
  axes.set(xlabel="predicted class", ylabel="class of the example")
  return figure


def calibration_figure(
  calibration: Calibration,
  title: str = "",
  confidence: str = "confidence in the predicted class",
) -> Figure:
  """Draw a reliability diagram above a histogram of the confidence.

  A bar shows the accuracy of the examples in a bin, a dot their mean
  confidence. For a calibrated model, the bars reach the diagonal.

  Args:
    calibration: result of `evaluation.calibrate`.
    title: title of the diagram.
    confidence: label of the confidence axis.
  """
  figure = Figure(figsize=(5, 5.4), layout="constrained")
  above, below = figure.subplots(
    2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1)}
  )
  edges, count = calibration.edges, calibration.count
  middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
  bars = above.bar(
    middle, calibration.accuracy, width, color=_DARK, edgecolor="white"
  )
  dots = above.plot(
    calibration.confidence, calibration.accuracy, "o", color=_LIGHT,
    markeredgecolor="black",
  )  # fmt: skip
  diagonal = above.plot((0, 1), (0, 1), "--", color="0.4")
  above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
  above.set_title(escaped(title), parse_math=False)
  figure.legend(
    (bars, *dots, *diagonal),
    ("accuracy", "mean confidence", "calibrated"),
    loc="outside upper center",
    ncols=3,
    fontsize=9,
    frameon=False,
  )
  below.bar(middle, count, width, color=_DARK, edgecolor="white")
  below.set(xlabel=confidence, ylabel="examples")
  for axes in (above, below):
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
  return figure


def precision_recall_figure(
  curves: Sequence[tuple[np.ndarray, np.ndarray]], names: Sequence[str]
) -> Figure:
  """Draw precision against recall, with a curve for each label.

  Args:
    curves: precision (k,) and recall (k,) of each label, by falling recall, as
      `precision_recall_curve` of scikit-learn returns them.
    names: names of the curves, for the legend.
  """
  figure = Figure(figsize=(6.5, 4.5), layout="constrained")
  axes = figure.subplots()
  for precision, recall in curves:
    axes.plot(recall, precision, drawstyle="steps-post")
  axes.set(xlabel="recall", ylabel="precision")
  axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
  axes.grid(alpha=0.3)
  legend = figure.legend(
    axes.lines,
    [shortened(escaped(name), _LONGEST_NAME) for name in names],
    loc="outside right upper",
    fontsize=9,
    frameon=False,
  )
  for text in legend.get_texts():
    text.set_parse_math(False)
  return figure


def scatter_figure(
  target: np.ndarray,
  predicted: np.ndarray,
  names: Sequence[str],
  units: Sequence[str] = (),
) -> Figure:
  """Draw predicted against true values, in panels for the first six values.

  Args:
    target: true values (n, c).
    predicted: predicted values (n, c), which must be finite.
    names: names of the c values.
    units: units of the c values; may be empty.

  Raises:
    DataError: if an array does not have the shape (n, c).
  """
  shape = np.shape(target)
  if shape != np.shape(predicted) or shape[1:] != (len(names),):
    raise DataError(
      f"true values have shape {shape} and predicted values "
      f"{np.shape(predicted)}, expected equal shapes (n, {len(names)}), "
      f"where {len(names)} is the number of names."
    )
  shown = min(len(names), _PANELS)
  rows, columns = -(-shown // 3), min(shown, 3)
  figure = Figure(figsize=(3.6 * columns, 3.6 * rows), layout="constrained")
  panels = figure.subplots(rows, columns, squeeze=False).ravel()
  for unused in panels[shown:]:
    unused.remove()
  for i, axes in enumerate(panels[:shown]):
    right, guess = target[:, i], predicted[:, i]
    axes.plot(right, guess, ".", color=_DARK, alpha=0.5, markersize=4)
    if len(right):
      ends = (right.min(), right.max())
      axes.plot(ends, ends, "--", color="0.4")
    unit = f" ({units[i]})" if len(units) and units[i] else ""
    name = shortened(escaped(names[i]), _LONGEST_NAME)
    axes.set_title(name, parse_math=False, fontsize=10)
    axes.set_xlabel(f"true{escaped(unit)}", parse_math=False)
    axes.set_ylabel(f"predicted{escaped(unit)}", parse_math=False)
    axes.grid(alpha=0.3)
  return figure


def mistakes_sheet(images: np.ndarray, titles: Sequence[str]) -> Figure:
  """Draw images side by side under their titles, six in a row.

  Args:
    images: images as for `image_grid`, except that b may be 0.
    titles: b texts, of which the first three lines are shown.

  Raises:
    DataError: if the shape of the images is wrong, or there are not b titles.
  """
  if not len(images) and not titles:
    figure = Figure(figsize=(4, 1))
    figure.text(0.5, 0.5, "no mistakes", ha="center", va="center")
    return figure
  captions = ["\n".join(title.split("\n")[:_TITLE_LINES]) for title in titles]
  return image_grid(
    images, captions, columns=_SHEET_COLUMNS, width=_SHEET_WIDTH
  )


def _neighbors_together(matrix: Any) -> tuple[np.ndarray, int]:
  """Sum counts over groups of neighboring classes, at most 400 groups.

  Returns the counts (k, k) of the k groups, and the number of classes in a
  group. A sparse matrix of 20,000 classes is never made dense.
  """
  together = -(-matrix.shape[0] // _SINGLE)
  if isinstance(matrix, np.ndarray):
    rows, columns = np.nonzero(matrix)
    values = matrix[rows, columns]
  else:
    sparse = matrix.tocoo()
    (rows, columns), values = sparse.coords, sparse.data
  side = -(-matrix.shape[0] // together)
  counts = np.zeros((side, side))
  np.add.at(counts, (rows // together, columns // together), values)
  return counts, together


def _number_cells(axes: Axes, counts: np.ndarray, shares: np.ndarray) -> None:
  for row, column in zip(*np.nonzero(counts), strict=True):
    colour = "white" if shares[row, column] > 0.5 else "black"
    axes.text(
      column, row, f"{counts[row, column]:.0f}", color=colour, fontsize=9,
      ha="center", va="center",
    )  # fmt: skip


def _name_classes(
  axes: Axes, class_names: Sequence[str], together: int
) -> None:
  """Label axes with class names or, above 40 classes, with a few indices."""
  if len(class_names) > _NAMED:
    locator = MaxNLocator(8, integer=True)
    ticks = np.asarray(locator.tick_values(0, len(class_names)))
    numbers = ticks[(ticks >= 0) & (ticks < len(class_names))]
    labels = [f"{number:,.0f}" for number in numbers]
    axes.set_xticks(numbers / together, labels)
    axes.set_yticks(numbers / together, labels)
    return
  names = [shortened(escaped(name), _LONGEST_NAME) for name in class_names]
  places = range(len(names))
  axes.set_xticks(places, names, rotation=90, fontsize=9, parse_math=False)
  axes.set_yticks(places, names, fontsize=9, parse_math=False)

"""Scores of the trials of a sweep as lines: accuracy, mAP or R2."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memory_vit.kinds import KINDS
from memory_vit.run_result import RunResult, TrialResult
from memory_vit.runtime.messages import escaped

# x, mean, least, greatest.
Point = tuple[float, float, float, float]
# Label -> points.
Lines = Mapping[str, Sequence[Point]]

_MARKERS = "os^Dv*PX"


def sweep_figure(result: RunResult) -> Figure:
  """Draw scores of a sweep over learning rate: accuracy, mAP or R2.

  There is a line for each regime and number of cells, on validation to the
  left, on the test split to the right. A point is the mean over all other
  options, a bar their range, of accuracies extended by a standard error on
  both sides.
  """
  figure = Figure(figsize=(9, 3.5), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  rates = sorted({task.learning_rate for task in result.tasks})
  for axes, key, title in (
    (left, "val", "validation"),
    (right, "test", "test"),
  ):
    _draw(axes, _by_setting(result.tasks, key))
    axes.set(title=title, xlabel="learning rate", xscale="log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xticks([], minor=True)
  # All trials are of one kind.
  left.set(ylabel=KINDS[result.tasks[0].kind].score_name)
  _label(left)
  if result.sweep is not None:
    figure.suptitle(escaped(result.sweep.task), parse_math=False)
  return figure


def lines_figure(
  lines: Lines, *, title: str, xlabel: str, ylabel: str, log: bool = False
) -> Figure:
  """Draw lines of means, with the range of each.

  With `log` the x axis is logarithmic.
  """
  figure = Figure(figsize=(6, 3.5), layout="constrained")
  axes = figure.subplots()
  _draw(axes, lines)
  axes.set_title(escaped(title), parse_math=False)
  axes.set_xlabel(escaped(xlabel), parse_math=False)
  axes.set_ylabel(escaped(ylabel), parse_math=False)
  if log:
    axes.set(xscale="log")
  _label(axes)
  return figure


def _draw(axes: Axes, lines: Lines) -> None:
  """Each line has a marker of its own, as colours are lost in print."""
  markers = itertools.cycle(_MARKERS)
  for (label, points), marker in zip(lines.items(), markers, strict=False):
    xs, means, least, greatest = np.reshape(points, (-1, 4)).T
    axes.errorbar(
      xs, means, yerr=(means - least, greatest - means), label=label,
      marker=marker, markersize=5, capsize=2,
    )  # fmt: skip
  axes.grid(alpha=0.3)


def _label(axes: Axes) -> None:
  """Add a legend, if there are lines; their labels are not formulas."""
  drawn = axes.containers
  if not drawn:
    return
  # A label that begins with "_" would be left out: labels come afterwards.
  legend = axes.legend(drawn, [str(i) for i in range(len(drawn))])
  for text, container in zip(legend.get_texts(), drawn, strict=True):
    text.set_text(escaped(str(container.get_label())))
    text.set_parse_math(False)


def _by_setting(tasks: Sequence[TrialResult], key: str) -> Lines:
  """Lines of the score ("val" or "test") over learning rate."""
  cells: dict[str, set[int]] = {}
  for task in tasks:
    cells.setdefault(task.regime, set()).add(task.cells)
  found: dict[str, dict[float, list[tuple[float, float]]]] = {}
  for task in sorted(tasks, key=lambda t: (t.regime, t.cells)):
    scores = getattr(task, key)
    if (score := scores.score) is not None:
      error = KINDS[task.kind].score_error(scores) or 0.0
      points = found.setdefault(_label_of(task, cells), {})
      points.setdefault(task.learning_rate, []).append((score, error))
  return {
    setting: [_point(rate, points[rate]) for rate in sorted(points)]
    for setting, points in found.items()
  }


def _point(rate: float, values: Sequence[tuple[float, float]]) -> Point:
  """The mean of scores, and their range with their errors."""
  mean = float(np.mean([score for score, _ in values]))
  least = min(score - error for score, error in values)
  greatest = max(score + error for score, error in values)
  return rate, mean, least, greatest


def _label_of(task: TrialResult, cells: Mapping[str, set[int]]) -> str:
  """The name of a line; `cells` is {regime: numbers of cells of trials}."""
  number = "1 cell" if task.cells == 1 else f"{task.cells} cells"
  if len(cells) == 1:
    return number
  several = len(cells[task.regime]) > 1
  return f"{task.regime}, {number}" if several else task.regime

"""Figures of sweeps: the scores of trials as lines."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memory_vit.kinds import KINDS
from memory_vit.run_result import RunResult, TrialResult
from memory_vit.runtime.messages import escaped

# Point of a line: (x, mean of y, minimum of y, maximum of y).
Point = tuple[float, float, float, float]
# {label of a line: points of the line}.
Lines = Mapping[str, Sequence[Point]]

_MARKERS = "os^Dv*PX"


def sweep_figure(result: RunResult) -> Figure:
  """Draw the scores of a sweep (accuracy, mAP or R2) over the learning rate.

  There is a line for each regime and number of cells, with scores on the
  validation split on the left, and on the test split on the right. A point is
  the mean score over all values of the other options, and a bar shows the range
  of these scores; for accuracies, plus a standard error at both ends.
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
  # The trials of a sweep all have the same kind of task.
  left.set(ylabel=KINDS[result.tasks[0].kind].score_name)
  _label(left)
  if result.sweep is not None:
    figure.suptitle(escaped(result.sweep.task), parse_math=False)
  return figure


def lines_figure(
  lines: Lines, *, title: str, xlabel: str, ylabel: str, log: bool = False
) -> Figure:
  """Draw lines of means, with ranges; `log` makes the x axis logarithmic."""
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
  """Draw lines, each with its own marker, because colours are lost in print."""
  markers = itertools.cycle(_MARKERS)
  for (label, points), marker in zip(lines.items(), markers, strict=False):
    xs, means, least, greatest = np.reshape(points, (-1, 4)).T
    axes.errorbar(
      xs, means, yerr=(means - least, greatest - means), label=label,
      marker=marker, markersize=5, capsize=2,
    )  # fmt: skip
  axes.grid(alpha=0.3)


def _label(axes: Axes) -> None:
  """Add a legend if there are lines; its labels are not read as formulas."""
  drawn = axes.containers
  if not drawn:
    return
  # A legend leaves out labels that begin with "_": set the real labels later.
  legend = axes.legend(drawn, [str(i) for i in range(len(drawn))])
  for text, container in zip(legend.get_texts(), drawn, strict=True):
    text.set_text(escaped(str(container.get_label())))
    text.set_parse_math(False)


def _by_setting(tasks: Sequence[TrialResult], key: str) -> Lines:
  """Return lines of scores over the learning rate; `key` is "val" or "test"."""
  cells: dict[str, set[int]] = {}
  for task in tasks:
    cells.setdefault(task.regime, set()).add(task.cells)
  settings: dict[str, dict[float, list[tuple[float, float]]]] = {}
  for task in sorted(tasks, key=lambda t: (t.regime, t.cells)):
    scores = getattr(task, key)
    if (score := scores.score) is not None:
      error = KINDS[task.kind].score_error(scores) or 0.0
      points = settings.setdefault(_label_of(task, cells), {})
      points.setdefault(task.learning_rate, []).append((score, error))
  return {
    setting: [_point(rate, points[rate]) for rate in sorted(points)]
    for setting, points in settings.items()
  }


def _point(rate: float, values: Sequence[tuple[float, float]]) -> Point:
  """Return the point for a learning rate, at the mean score.

  `values` are pairs (score, standard error).
  """
  mean = float(np.mean([score for score, _ in values]))
  least = min(score - error for score, error in values)
  greatest = max(score + error for score, error in values)
  return rate, mean, least, greatest


def _label_of(task: TrialResult, cells: Mapping[str, set[int]]) -> str:
  """Return the label of a line; `cells`: {regime: numbers of memory cells}."""
  number = "1 cell" if task.cells == 1 else f"{task.cells} cells"
  if len(cells) == 1:
    return number
  several = len(cells[task.regime]) > 1
  return f"{task.regime}, {number}" if several else task.regime

"""Figures for notebooks: images with their names, and how a run went.

Figures are made without `pyplot`: nothing global keeps them alive, and each is
shown once, where a cell returns it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util

from memory_vit.errors import DataError, TrainingError
from memory_vit.run_result import RunResult, TrialResult

# Tag -> steps, int64 (k,), and values, float64 (k,).
Scalars = dict[str, tuple[np.ndarray, np.ndarray]]
# x, mean, least, greatest.
Point = tuple[float, float, float, float]
# Label -> points.
Lines = Mapping[str, Sequence[Point]]

_COLUMNS = 8
_EVENTS = "events.out.tfevents.*"


def image_grid(images: np.ndarray, titles: Sequence[str]) -> Figure:
  """Images side by side, each under its title, in a figure with b axes.

  Args:
    images: floats (b, side, side, 3) in [-1, 1], as the model takes them.
    titles: b texts, of one line or of several.

  Raises:
    DataError: for images of another shape, or another number of titles.
  """
  images = np.asarray(images)
  if images.ndim != 4 or images.shape[-1] != 3 or not len(images):
    raise DataError(
      f"images have shape {images.shape}, expected (batch, side, side, 3)."
    )
  if len(titles) != len(images):
    raise DataError(f"{len(titles)} titles for {len(images)} images.")
  columns = min(_COLUMNS, len(images))
  rows = -(-len(images) // columns)
  lines = max(title.count("\n") + 1 for title in titles)
  size = (1.2 * columns, (1.15 + 0.2 * lines) * rows)
  figure = Figure(figsize=size, layout="constrained")
  for i, (image, title) in enumerate(zip(images, titles, strict=True)):
    axes = figure.add_subplot(rows, columns, i + 1)
    # Each value as it is: stretched contrasts would not be what the model sees.
    axes.imshow(np.clip((image + 1) / 2, 0, 1))
    axes.set_title(title, fontsize=10)
    axes.set_axis_off()
  return figure


def read_scalars(workdir: str | os.PathLike[str]) -> Scalars:
  """Read what a run wrote for TensorBoard; the steps of each tag are rising.

  Where a run was stopped and went on, a step that was done twice counts as the
  last time.

  Raises:
    TrainingError: where there are no events.
  """
  path = Path(workdir)
  if not any(path.glob(_EVENTS)):
    raise TrainingError(
      f"{path} has no TensorBoard events ({_EVENTS}). Expected the workdir of "
      "a run that has trained."
    )
  # Without a limit: by default ten values of a tag are kept, drawn by chance.
  events = event_accumulator.EventAccumulator(
    os.fspath(path),
    size_guidance={event_accumulator.TENSORS: 0},
    purge_orphaned_data=False,
  )
  events.Reload()
  scalars = {}
  for tag in events.PluginTagToContent("scalars"):
    # In the order of writing, which is not that of the names of the files.
    values = {
      event.step: float(tensor_util.make_ndarray(event.tensor_proto))
      for event in sorted(events.Tensors(tag), key=lambda e: e.wall_time)
    }
    steps = sorted(values)
    scalars[tag] = (
      np.array(steps, np.int64),
      np.array([values[step] for step in steps]),
    )
  return scalars


def training_curves(logdir: str | os.PathLike[str]) -> Figure:
  """Loss and accuracy of a task over the steps of its run.

  Loss to the left, accuracy to the right, each on training batches and, where
  the run had a validation set, on that.

  Args:
    logdir: the workdir of a run, or of a sweep WORKDIR/sweep/TRIAL.

  Raises:
    TrainingError: where there are no events, or none of training.
  """
  scalars = read_scalars(logdir)
  if "train/loss" not in scalars:
    raise TrainingError(
      f"the events in {logdir} have no train/loss, only {sorted(scalars)}."
    )
  figure = Figure(figsize=(9, 3), layout="constrained")
  loss, accuracy = figure.subplots(1, 2)
  for axes, training, validation in (
    (loss, "train/loss", "validation/loss"),
    (accuracy, "train/accuracy", "validation/top1"),
  ):
    for label, tag in (("training", training), ("validation", validation)):
      if tag in scalars:
        axes.plot(*scalars[tag], label=label, marker="o", markersize=4)
    axes.grid(alpha=0.3)
    axes.legend()
  loss.set(title="loss", xlabel="step", ylim=(0, None))
  accuracy.set(title="accuracy", xlabel="step", ylim=(0, 1.02))
  return figure


def sweep_figure(result: RunResult) -> Figure:
  """Accuracies of a sweep over learning rate, a line for each number of cells.

  On validation to the left, on the test split to the right; a point is the mean
  over what else was varied, a bar its range.
  """
  figure = Figure(figsize=(9, 3.5), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  for axes, key, title in (
    (left, "val_accuracy", "validation"),
    (right, "test_accuracy", "test"),
  ):
    _draw(axes, _by_cells(result.tasks, key))
    axes.set(title=title, xlabel="learning rate", xscale="log")
  left.set(ylabel="accuracy")
  if left.get_legend_handles_labels()[0]:
    left.legend()
  if result.sweep is not None:
    figure.suptitle(result.sweep.task)
  return figure


def lines_figure(
  lines: Lines, *, title: str, xlabel: str, ylabel: str, log: bool = False
) -> Figure:
  """Lines of points with the range of what they are the mean of.

  With `log` the x axis is logarithmic.
  """
  figure = Figure(figsize=(6, 3.5), layout="constrained")
  axes = figure.subplots()
  _draw(axes, lines)
  axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
  if log:
    axes.set(xscale="log")
  if lines:
    axes.legend()
  return figure


def _draw(axes: Axes, lines: Lines) -> None:
  """Draw lines with bars from the least to the greatest of each point."""
  for label, points in lines.items():
    xs, means, least, greatest = np.reshape(points, (-1, 4)).T
    axes.errorbar(
      xs, means, yerr=(means - least, greatest - means), label=label,
      marker="o", markersize=4, capsize=2,
    )  # fmt: skip
  axes.grid(alpha=0.3)


def _by_cells(tasks: Sequence[TrialResult], key: str) -> Lines:
  """Lines of accuracies over learning rate; without missing ones."""
  found: dict[tuple[int, float], list[float]] = {}
  for task in tasks:
    if (accuracy := getattr(task, key)) is not None:
      setting = (task.cells, task.learning_rate)
      found.setdefault(setting, []).append(accuracy)
  lines: dict[str, list[Point]] = {}
  for (cells, rate), values in sorted(found.items()):
    point = (rate, float(np.mean(values)), min(values), max(values))
    lines.setdefault(f"{cells} cells", []).append(point)
  return lines

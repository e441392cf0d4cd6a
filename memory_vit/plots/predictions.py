"""Images with the predictions of tasks."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memory_vit.errors import DataError
from memory_vit.kinds import CLASSES, TaskKind, answer_line
from memory_vit.plots.images import to_pixels
from memory_vit.runtime.messages import escaped, shortened

_COLUMNS = 6
# Maximum length of a name in a line with one name, and in a line with two.
_ALONE, _BESIDE = 20, 11
_SHARE = 5  # length of a probability after a name: " 100%"
_WIDTH = 1.75
_LINE = 0.18
# Colours of right, wrong and unmarked answers: dark on white, distinct for
# colour-blind people. Right and wrong answers also get different marks.
_RIGHT, _WRONG, _NEITHER = "#00573f", "#a03800", "#202020"


def prediction_grid(
  images: np.ndarray,
  logits: Mapping[str, np.ndarray],
  class_names: Mapping[str, Sequence[str]],
  truths: Sequence[str] = (),
  kinds: Mapping[str, TaskKind] | None = None,
) -> Figure:
  """Draw images, each above the answers of all tasks.

  An answer is the most probable class, or "unknown (CLASS)" if the task rejects
  the image; the labels at or above their thresholds; or values. The answer of a
  task that has the true class of an image is marked as right or wrong. If
  outputs are not all finite, the answer is "not finite" and marked as wrong.

  Args:
    images: floats (b, side, side, 3) in [-1, 1], as the model takes them, or
      uint8 pixels of that shape.
    logits: {name of a task: logits (b, c)}, as `mv.forward` returns them; tasks
      that `class_names` leaves out are not shown.
    class_names: {name of a task: c names of classes, labels or values}.
    truths: name of the true class of each image; empty if unknown.
    kinds: {name of a task: `task.spec.kind`}; a task left out has classes.

  Raises:
    DataError: if the numbers of images, logits, names and truths do not match.
  """
  class_names = {task: tuple(names) for task, names in class_names.items()}
  images = to_pixels(images)
  known = len(truths) > 0
  if known and len(truths) != len(images):
    raise DataError(
      f"the number of true classes is {len(truths)}, expected {len(images)}: "
      "one class for each image."
    )
  kinds = {task: (kinds or {}).get(task, CLASSES) for task in class_names}
  activated = {
    task: _activated(task, kinds[task], logits, names, len(images))
    for task, names in class_names.items()
  }
  unknown = {
    task: kinds[task]
    .rejection(np.asarray(logits[task]))
    .get("unknown", np.zeros(len(images), bool))
    for task in class_names
  }
  columns = min(_COLUMNS, len(images))
  rows = -(-len(images) // columns)
  height = _WIDTH + _LINE * (len(activated) + known)
  figure = Figure(figsize=(_WIDTH * columns, height * rows))
  # constrained_layout would add space around the text under each image.
  figure.subplots_adjust(0.01, 0.01, 0.99, 0.99, wspace=0.08, hspace=0)
  grid = figure.add_gridspec(rows, columns)
  for i, image in enumerate(images):
    cell = grid[divmod(i, columns)].subgridspec(
      2, 1, height_ratios=(_WIDTH, height - _WIDTH), hspace=0
    )
    picture = figure.add_subplot(cell[0])
    picture.imshow(image)
    picture.set_axis_off()
    truth = truths[i] if known else None
    answers = {
      task: (kinds[task], class_names[task], outputs[i], bool(unknown[task][i]))
      for task, outputs in activated.items()
    }
    _write(figure.add_subplot(cell[1]), truth, answers)
  return figure


def _activated(
  task: str,
  kind: TaskKind,
  logits: Mapping[str, np.ndarray],
  names: Sequence[str],
  count: int,
) -> np.ndarray:
  """Return activated logits (b, c); a row with a non-finite logit is NaN."""
  if task not in logits:
    raise DataError(f"there are no logits of {task!r}, only of {list(logits)}.")
  values = np.asarray(logits[task], np.float64)
  if values.shape != (count, len(names)):
    raise DataError(
      f"logits of {task!r} have shape {values.shape}, expected {count} rows "
      f"(images) and {len(names)} columns ({kind.name})."
    )
  # The softmax of an infinite logit may be finite, but it is meaningless.
  finite = np.isfinite(values).all(axis=-1, keepdims=True)
  return np.where(finite, kind.activate(np.where(finite, values, 0)), np.nan)


def _write(
  axes: Axes,
  truth: str | None,
  answers: Mapping[str, tuple[TaskKind, Sequence[str], np.ndarray, bool]],
) -> None:
  axes.set_axis_off()
  several = len(answers) > 1
  lines = []
  if truth is not None:
    lines.append((f"is: {_short(truth, _ALONE)}", _NEITHER, "bold"))
  room = _BESIDE if several else _ALONE
  for task, (kind, names, outputs, unknown) in answers.items():
    mark, colour, answer = "", _NEITHER, "not finite"
    finite = bool(np.isfinite(outputs).all())
    one_is_right = kind.kind.one_is_right
    if finite and one_is_right:
      best = int(outputs.argmax())
      answer = f"{_short(names[best], room)} {outputs[best]:.0%}"
      answer = f"unknown ({answer})" if unknown else answer
    elif finite:
      [entries] = kind.answers(names, outputs[None])
      answer = _short(answer_line(entries), room + _SHARE)
    has_truth = one_is_right and truth in names
    if not finite or (truth is not None and has_truth):
      right = finite and names[best] == truth
      mark, colour = ("\u2713 ", _RIGHT) if right else ("\u2717 ", _WRONG)
    task = f"{_short(task, _BESIDE)}: " if several else ""
    lines.append((f"{mark}{task}{answer}", colour, "normal"))
  for number, (line, colour, weight) in enumerate(lines):
    axes.text(
      0.5, 1 - (number + 0.5) / len(lines), line, color=colour, weight=weight,
      fontsize=8, ha="center", va="center", parse_math=False,
    )  # fmt: skip


def _short(name: str, most: int) -> str:
  return shortened(escaped(name), most)

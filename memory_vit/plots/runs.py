"""Training curves of a run, from its TensorBoard events."""

import os

import numpy as np
from matplotlib.figure import Figure
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util

from memory_vit.errors import TrainingError
from memory_vit.kinds import CLASSES, KINDS, Kind
from memory_vit.runtime import files, paths

# {tag: (steps, values)}: steps are int64 (k,), values float64 (k,).
Scalars = dict[str, tuple[np.ndarray, np.ndarray]]

_EVENTS = "events.out.tfevents.*"


def read_scalars(workdir: str | os.PathLike[str]) -> Scalars:
  """Read the scalars that a run wrote for TensorBoard; steps are ascending.

  If a resumed run has repeated a step, the last value of the step counts.

  Raises:
    TrainingError: if there are no events.
  """
  path = paths.as_path(workdir)
  if not any(path.glob(_EVENTS)):
    raise TrainingError(
      f"{path} has no TensorBoard events ({_EVENTS}). Expected the workdir of "
      "a run that has trained."
    )
  with files.fetched(path) as local:
    # 0 keeps all values of a tag; the default keeps only ten random values.
    events = event_accumulator.EventAccumulator(
      os.fspath(local),
      size_guidance={event_accumulator.TENSORS: 0},
      purge_orphaned_data=False,
    )
    events.Reload()
  scalars = {}
  for tag in events.PluginTagToContent("scalars"):
    # Sort by time: the names of event files do not follow the order of writing.
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
  """Draw loss and score of a task over the steps of its run.

  The loss is on the left, the accuracy on the right, both on training batches
  and on the validation split, if there is one. In place of the accuracy, labels
  have the mean average precision, and values R2, on the validation split only.

  Args:
    logdir: the workdir of a run, or WORKDIR/sweep/TRIAL for a trial of a sweep.

  Raises:
    TrainingError: if there are no events, or no training losses.
  """
  scalars = read_scalars(logdir)
  if "train/loss" not in scalars:
    raise TrainingError(
      f"the events in {logdir} have no tag train/loss, only the tags "
      f"{sorted(scalars)}."
    )
  figure = Figure(figsize=(9, 3), layout="constrained")
  loss, score = figure.subplots(1, 2)
  kind = _kind_of(scalars)
  for axes, training, validation in (
    (loss, "train/loss", "validation/loss"),
    (score, *_score_tags(kind)),
  ):
    for label, tag in (("training", training), ("validation", validation)):
      if tag in scalars:
        axes.plot(*scalars[tag], label=label, marker="o", markersize=4)
    axes.grid(alpha=0.3)
    axes.margins(y=0.1)  # space above the first loss, which is the highest
    if axes.lines:
      axes.legend()
  loss.set(title="loss", xlabel="step", ylim=(0, None))
  score.set(title=kind.score_name, xlabel="step", ylim=(kind.least_score, 1.02))
  return figure


def _kind_of(scalars: Scalars) -> Kind:
  """Infer the kind of the task from the tags of its metrics."""
  for kind in KINDS.values():
    if f"validation/{kind.score_key}" in scalars:
      return kind
  for kind in KINDS.values():
    if f"train/{kind.trained_metric}" in scalars:
      return kind
  return CLASSES.kind


def _score_tags(kind: Kind) -> tuple[str, str]:
  """Return (tag of the training score, tag of the validation score).

  For labels and values, the first tag is "", so no training score is drawn:
  training does not log the score (mAP or R2). It logs another metric: for
  labels, the accuracy over pairs of image and label; for values, the mean
  absolute error.
  """
  training = f"train/{kind.trained_metric}" if kind.one_is_right else ""
  return training, f"validation/{kind.score_key}"

"""Padded heads: more outputs than classes, so that tasks share programs.

Outputs beyond the classes are cut off before a task is exported.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from memory_vit.errors import ConfigError
from memory_vit.evaluation.evaluate import Predict
from memory_vit.kinds import TaskKind
from memory_vit.model.task import Task


def require_width(padded: int, classes: int) -> None:
  if padded and padded < classes:
    raise ConfigError(
      f"config.task.padded_classes is {padded}, but the data set has {classes} "
      "classes: expected at least the number of classes, or 0."
    )


def is_class(padded: int, classes: int) -> np.ndarray | None:
  """Return a mask (padded,), False for padding; None if there is no padding."""
  return np.arange(padded) < classes if padded > classes else None


def without_padding(
  task: Task, class_names: Sequence[str], kind: TaskKind
) -> Task:
  classes = len(class_names)
  head = task.params["head"]
  spec = dataclasses.replace(
    task.spec, num_classes=classes, class_names=tuple(class_names), kind=kind
  )
  cut = {
    "kernel": head["kernel"][:, :classes],
    "bias": head["bias"][:classes],
  }
  return dataclasses.replace(
    task, spec=spec, params={**task.params, "head": cut}
  )


def of_classes(predict: Predict, classes: int) -> Predict:
  """Wrap `predict`: cut off the logits that pad the head."""

  def cut(images: jax.Array) -> dict[str, jax.Array]:
    logits = predict(images)
    return {name: rows[:, :classes] for name, rows in logits.items()}

  return cut

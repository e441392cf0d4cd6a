"""A task of each kind, with random parameters."""

import numpy as np
from conftest import random_task

import memory_vit as mv
from memory_vit.kinds import CLASSES, label_metrics, value_metrics

LABELS = mv.TaskKind(name="labels", thresholds=(0.3, 0.5, 0.7))
VALUES = mv.TaskKind(
  name="values",
  mean=(10.0, 2000.0),
  std=(30.0, 0.5),
  units=("degrees", "mm"),
)


def tasks_of_kinds(backbone):
  """One of 3 classes, one of 3 labels, and one of 2 values."""
  return (
    random_task(backbone, "pets", class_names=("cat", "dog", "hen")),
    random_task(
      backbone, "tags", seed=1, cells=1, kind=LABELS,
      class_names=("even", "above 4", "prime"),
    ),
    random_task(
      backbone, "size", seed=2, classes=2, cells=3, kind=VALUES,
      class_names=("angle", "height"),
    ),
  )  # fmt: skip


def activated(backbone, tasks, images):
  """Probabilities and values by NumPy, as exports and answers have them."""
  kinds = {"backbone": CLASSES, **{task.name: task.spec.kind for task in tasks}}
  logits = mv.forward(backbone, tasks, images)
  return {
    name: kind.activate(np.asarray(logits[name], np.float64))
    for name, kind in kinds.items()
  }


def of_outputs(kind, outputs, targets, mask):
  """Predictions of a task of labels or values; `mask` is 1 if a row counts."""
  metrics = {"labels": label_metrics, "values": value_metrics}[kind.name]
  rows = np.float32(outputs), targets, mask > 0
  return metrics.evaluation_of_rows(kind, *rows).predictions

"""A task of each kind, with random parameters."""

from conftest import random_task

import memory_vit as mv

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

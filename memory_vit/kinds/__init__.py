"""Kinds of tasks (classes, labels, values): losses, metrics and answers."""

from memory_vit.kinds.classes import Classes
from memory_vit.kinds.kind import Kind
from memory_vit.kinds.labels import Labels
from memory_vit.kinds.task_kind import (
  KINDS,
  TaskKind,
  answer_line,
  answer_rows,
  find_metric,
)
from memory_vit.kinds.values import Values

KINDS.update({kind.name: kind for kind in (Classes(), Labels(), Values())})
CLASSES = TaskKind()

__all__ = [
  "CLASSES",
  "KINDS",
  "Kind",
  "TaskKind",
  "answer_line",
  "answer_rows",
  "find_metric",
]

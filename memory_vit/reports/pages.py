"""Subclasses of `TaskEvaluation`, by the name of the kind of their tasks."""

from memory_vit.reports.class_page import ClassEvaluation
from memory_vit.reports.label_page import LabelEvaluation
from memory_vit.reports.task_evaluation import TaskEvaluation
from memory_vit.reports.value_page import ValueEvaluation

PAGES: dict[str, type[TaskEvaluation]] = {
  page.kind: page
  for page in (ClassEvaluation, LabelEvaluation, ValueEvaluation)
}

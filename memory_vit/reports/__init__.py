"""Evaluation reports: an HTML page, figures, CSV and Parquet tables."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.reports.directory import first_page, write_reports
  from memory_vit.reports.task_evaluation import TaskEvaluation
  from memory_vit.reports.task_figures import figures

__all__ = [
  "TaskEvaluation",
  "figures",
  "first_page",
  "write_reports",
]

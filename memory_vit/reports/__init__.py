"""An evaluation as tables, figures and one page."""

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

"""VTAB-1k by one command: 19 tasks of 1,000 images each, made of runs."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.benchmark.report import write_report
  from memory_vit.benchmark.runner import run_benchmark
  from memory_vit.benchmark.tasks import GROUPS, TASKS, VtabTask

__all__ = ["GROUPS", "TASKS", "VtabTask", "run_benchmark", "write_report"]

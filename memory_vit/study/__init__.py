"""The tables of the paper by one command, made of runs."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.study.report import write_report
  from memory_vit.study.runner import run_study
  from memory_vit.study.runs import PARTS, possible_parts

__all__ = ["PARTS", "possible_parts", "run_study", "write_report"]

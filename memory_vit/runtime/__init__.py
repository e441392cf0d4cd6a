"""Processes, signals, locks, files and devices, independent of the model."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.runtime.launch import Options as ProcessOptions
  from memory_vit.runtime.launch import leaving
  from memory_vit.runtime.launch import start as join_processes
  from memory_vit.runtime.lock import only_run
  from memory_vit.runtime.preemption import StopSignal
  from memory_vit.runtime.processes import on_process_0, require_same
  from memory_vit.runtime.progress_bar import log_package
  from memory_vit.runtime.sharding import make_mesh

__all__ = [
  "ProcessOptions",
  "StopSignal",
  "join_processes",
  "leaving",
  "log_package",
  "make_mesh",
  "on_process_0",
  "only_run",
  "require_same",
]

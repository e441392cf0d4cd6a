"""Tasks: make, compose, save, load, and run many in one pass."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.tasks.compose import concatenate, remove, rename, select
  from memory_vit.tasks.create import init_task
  from memory_vit.tasks.program import encode, forward, read
  from memory_vit.tasks.slots import Slots, fill_slots
  from memory_vit.tasks.store import (
    load_task,
    load_tasks,
    save_task,
    save_tasks,
  )

__all__ = [
  "Slots",
  "concatenate",
  "encode",
  "fill_slots",
  "forward",
  "init_task",
  "load_task",
  "load_tasks",
  "read",
  "remove",
  "rename",
  "save_task",
  "save_tasks",
  "select",
]

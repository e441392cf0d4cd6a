"""Training runs: step, loop, saved states, resuming, sweeps and results."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.train.run import train_and_evaluate
  from memory_vit.train.run_lists import run_differences, shared_backbone

__all__ = [
  "run_differences",
  "shared_backbone",
  "train_and_evaluate",
]

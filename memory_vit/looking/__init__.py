"""Attention of tasks in images, and ablation of their memory cells."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.looking.attention_figures import (
    answer_title,
    attention_difference,
    attention_overlays,
    cell_removal_figure,
    memory_shares_figure,
  )
  from memory_vit.looking.cell_removal import (
    CellRemoval,
    Removals,
    remove_cells,
  )

__all__ = [
  "CellRemoval",
  "Removals",
  "answer_title",
  "attention_difference",
  "attention_overlays",
  "cell_removal_figure",
  "memory_shares_figure",
  "remove_cells",
]

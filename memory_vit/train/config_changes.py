"""Options that may change when a run resumes; its result records them.

The structure of the saved state, the classes and the order of the images never
change.
"""

from collections.abc import Mapping
from typing import Any

from memory_vit.config import OPTIONS

_RECORDED = [
  f"config.{k}" for k, o in OPTIONS.items() if o.resume == "recorded"
]


def changes(
  step: int, began: Mapping[str, Any], now: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """List the options that differ, and may, from those of a saved state."""
  return [
    {"step": step, "key": key, "from": began[key], "to": now[key]}
    for key in _RECORDED
    if key in began and began[key] != now[key]
  ]

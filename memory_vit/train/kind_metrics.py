"""Metrics of a run by kind of task: which are stored, logged and shown."""

import math
from collections.abc import Mapping
from typing import Any

# Entries of an evaluation that results store beside score and loss. A task of
# classes has fields of its own.
_STORED: dict[str, tuple[str, ...]] = {
  "classes": (),
  "labels": (
    "map", "f1_macro", "calibration_error", "per_class", "f1_per_class",
  ),
  "values": ("r2", "mae", "rmse", "spearman", "per_class"),
}  # fmt: skip
# The entry that is the score.
SCORES = {"classes": "top1", "labels": "map", "values": "r2"}
# Names for people, of metrics that have others than their keys.
TITLES = {
  "top1": "top-1", "top5": "top-5", "map": "mAP", "f1_macro": "macro F1",
  "calibration_error": "calibration error", "r2": "R2", "mae": "MAE",
  "rmse": "RMSE", "spearman": "Spearman",
}  # fmt: skip


def stored(kind: str, result: Mapping[str, Any]) -> dict[str, Any]:
  """The metrics of `TrialResult` in the result of an evaluation."""
  return {key: result[key] for key in _STORED[kind]}


def logged(kind: str, result: Mapping[str, Any]) -> dict[str, float]:
  """Numbers of an evaluation for events and log lines, but undefined ones."""
  keys = [key for key in _STORED[kind] if "per_class" not in key]
  found = {key: result[key] for key in ("loss", *(keys or ("top1", "top5")))}
  return {key: value for key, value in found.items() if value is not None}


def finite(number: float | None) -> float | None:
  """JSON has no NaN and no infinity."""
  return number if number is not None and math.isfinite(number) else None

"""Answers to images as JSON: the classes, labels or values of a task.

classes  [{"class", "index", "probability"}, ...], the most probable first
labels   {"labels": [{"label", "index", "probability"}, ...]}, those with at
         least their thresholds, the most probable first
values   {"values": [{"name", "value", "unit"}, ...]}, all, in their order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from memory_vit.model.kinds import TaskKind
from memory_vit.prediction.guesses import (
  Guess,
  best_guesses,
  class_label,
  label_guesses,
)


def answers(
  kind: TaskKind,
  names: Sequence[str],
  activated: Float[np.ndarray, "k c"],
  top: int,
) -> list[Any]:
  """The answer to each image, of what `TaskKind.activate` made.

  `names` may be empty, and `top` is the number of classes.
  """
  if kind.is_values:
    return [{"values": _values(kind, names, row)} for row in activated]
  if kind.is_labels:
    found = label_guesses(kind, names, activated)
    return [{"labels": _guesses(row, "label")} for row in found]
  found = best_guesses(names, activated, top)
  return [_guesses(row, "class") for row in found]


def rows(answer: Any) -> list[tuple[str, str]]:
  """The name and the number of each class, label or value, for people."""
  if "values" in answer:
    return [
      (one["name"], f"{one['value']:.4g} {one['unit']}".rstrip())
      for one in answer["values"]
    ]
  key = "label" if "labels" in answer else "class"
  found = [
    (one[key], f"{100 * one['probability']:.1f} %")
    for one in (answer["labels"] if key == "label" else answer)
  ]
  return found or [("no label", "")]


def line(answer: Any) -> str:
  """The same in one line."""
  return ", ".join(" ".join(row).rstrip() for row in rows(answer))


def _values(
  kind: TaskKind, names: Sequence[str], row: Float[np.ndarray, " c"]
) -> list[dict[str, Any]]:
  units = kind.units or ("",) * len(row)
  return [
    {"name": class_label(names, i), "value": value, "unit": units[i]}
    for i, value in enumerate(row.tolist())
  ]


def _guesses(guesses: Sequence[Guess], key: str) -> list[dict[str, Any]]:
  return [
    {key: g.class_name, "index": g.index, "probability": g.probability}
    for g in guesses
  ]

"""Answers to images as JSON: the classes, labels or values of a task.

classes  [{"class", "index", "probability"}, ...], the most probable first
labels   {"labels": [{"label", "index", "probability"}, ...]}, those at or
         above their thresholds, the most probable first
values   {"values": [{"name", "value", "unit"}, ...]}, all, in their order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from memory_vit.errors import ConfigError
from memory_vit.model.kinds import TaskKind
from memory_vit.runtime.messages import number

Probabilities = Float[np.ndarray, "k c"]


@dataclasses.dataclass(frozen=True)
class Guess:
  """A class or label: name (or index, as text), index from 0, probability."""

  class_name: str
  index: int
  probability: float


def best_guesses(
  names: Sequence[str], probabilities: Probabilities, count: int
) -> list[list[Guess]]:
  """The most probable classes of each image, the best first."""
  indices = best(probabilities, count)
  shares = np.take_along_axis(probabilities, indices, axis=-1)
  return [
    [
      Guess(class_label(names, index), index, share)
      for index, share in zip(*of_image, strict=True)
    ]
    for of_image in zip(indices.tolist(), shares.tolist(), strict=True)
  ]


def label_guesses(
  kind: TaskKind,
  names: Sequence[str],
  probabilities: Probabilities,
  most: int | None = None,
) -> list[list[Guess]]:
  """The labels of each image at or above their thresholds, the best first."""
  chosen = kind.chosen(probabilities)
  count = max(1, int(chosen.sum(axis=-1).max(initial=0)))
  count = min(count, most or count)
  # Those that are not chosen come last.
  found = best_guesses(names, np.where(chosen, probabilities, -1), count)
  return [[g for g in row if g.probability >= 0] for row in found]


def best(probabilities: Probabilities, count: int) -> np.ndarray:
  """Indices (k, count) of the best classes; of equal ones the first."""
  if count < 1:
    raise ConfigError(f"the number of classes is {count}, expected 1 or more.")
  # Row by row: no other thread runs while NumPy sorts.
  rows = [np.argsort(-row, kind="stable")[:count] for row in probabilities]
  shape = len(probabilities), min(count, probabilities.shape[-1])
  return np.array(rows, np.intp).reshape(shape)


def class_label(names: Sequence[str], index: int) -> str:
  """The name of an output, or its index if no names are known."""
  return names[index] if names else str(index)


def answers(
  kind: TaskKind,
  names: Sequence[str],
  activated: Float[np.ndarray, "k c"],
  top: int,
  most_labels: int | None = None,
) -> list[Any]:
  """The answer to each image, of what `TaskKind.activate` made.

  `names` may be empty, and `top` is the number of classes. By default all
  labels at or above their thresholds are returned.
  """
  if kind.is_values:
    return [{"values": _values(kind, names, row)} for row in activated]
  if kind.is_labels:
    found = label_guesses(kind, names, activated, most_labels)
    return [{"labels": _guesses(row, "label")} for row in found]
  found = best_guesses(names, activated, top)
  return [_guesses(row, "class") for row in found]


def number_of_answers(
  kind: TaskKind,
  activated: Float[np.ndarray, "k c"],
  top: int,
  most_labels: int | None = None,
) -> int:
  """The number of classes, labels or values that `answers` would return.

  An image without labels counts as one.
  """
  images, outputs = activated.shape
  if kind.is_labels:
    chosen = kind.chosen(activated).sum(axis=-1)
    return int(chosen.clip(1, most_labels or outputs).sum())
  return images * (outputs if kind.is_values else min(top, outputs))


def rows(answer: Any) -> list[tuple[str, str]]:
  """The name and the number of each class, label or value, for people."""
  if "values" in answer:
    return [
      (one["name"], f"{number(one['value'])} {one['unit']}".rstrip())
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

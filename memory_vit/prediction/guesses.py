"""Guesses: the most probable classes, or the labels above their thresholds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from memory_vit.errors import ConfigError
from memory_vit.model.kinds import TaskKind

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
  kind: TaskKind, names: Sequence[str], probabilities: Probabilities
) -> list[list[Guess]]:
  """The labels of each image with at least their thresholds, the best first."""
  chosen = kind.chosen(probabilities)
  count = max(1, int(chosen.sum(axis=-1).max(initial=0)))
  # Those that are not chosen come last.
  found = best_guesses(names, np.where(chosen, probabilities, -1), count)
  return [[g for g in row if g.probability >= 0] for row in found]


def best(probabilities: Probabilities, count: int) -> np.ndarray:
  """Indices (k, count) of the best classes; of equal ones the first."""
  if count < 1:
    raise ConfigError(f"the number of classes is {count}, expected 1 or more.")
  return np.argsort(-probabilities, axis=-1, kind="stable")[:, :count]


def class_label(names: Sequence[str], index: int) -> str:
  """The name of an output, or its index if no names are known."""
  return names[index] if names else str(index)

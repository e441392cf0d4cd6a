"""The most probable classes or labels of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError

with epy.lazy_imports():
  import numpy as np


@dataclasses.dataclass(frozen=True)
class Guess:
  """Predicted class or label: name (or index as text), index, probability."""

  class_name: str
  index: int
  probability: float

  def to_json(self, key: str) -> dict[str, Any]:
    """Return the guess as JSON, with its name under `key`."""
    return {
      key: self.class_name, "index": self.index, "probability": self.probability
    }  # fmt: skip


def best_guesses(
  names: Sequence[str], probabilities: np.ndarray, count: int
) -> list[list[Guess]]:
  """Return the most probable classes of each of k images, best first."""
  indices = best(probabilities, count)
  shares = np.take_along_axis(probabilities, indices, axis=-1)
  return [
    [
      Guess(class_label(names, index), index, share)
      for index, share in zip(*of_image, strict=True)
    ]
    for of_image in zip(indices.tolist(), shares.tolist(), strict=True)
  ]


def best(probabilities: np.ndarray, count: int) -> np.ndarray:
  """Return indices (k, count) of the best classes, ties by class index."""
  if count < 1:
    raise ConfigError(f"the number of classes is {count}, expected 1 or more.")
  return np.argsort(-probabilities, axis=-1, kind="stable")[:, :count]


def class_label(names: Sequence[str], index: int) -> str:
  """Return the name of an output, or its index if no names are known."""
  return names[index] if names else str(index)


def guess_rows(
  guesses: Sequence[Mapping[str, Any]], key: str
) -> list[tuple[str, str]]:
  """Return the name and percentage of each guess in JSON form, for display."""
  return [(g[key], f"{100 * g['probability']:.1f} %") for g in guesses]


def guess_columns(
  guesses: Sequence[Sequence[Guess]], columns: Iterable[str]
) -> dict[str, list[Any]]:
  """Return columns of names, indices and probabilities, a list per image."""
  fields = ("class_name", "index", "probability")
  return {
    column: [[getattr(guess, field) for guess in row] for row in guesses]
    for column, field in zip(columns, fields, strict=True)
  }

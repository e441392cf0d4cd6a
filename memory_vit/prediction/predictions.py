"""Predictions: logits, and the best classes of each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from memory_vit.errors import ConfigError, TaskError, UnknownTask
from memory_vit.model.task import BACKBONE
from memory_vit.prediction.task_set import TaskSet
from memory_vit.runtime.messages import brief, name_list


@dataclasses.dataclass(frozen=True)
class Guess:
  """A class: name (or index, as text), index from 0, probability."""

  class_name: str
  index: int
  probability: float


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Predictions:
  """The answers to k images, all of one set of tasks.

  Attributes:
    task_set: that answered.
    logits: {name of a task: float32 (k, c)}, of the requested tasks.
    original: float32 (k, c0), the original outputs; None if not requested.
    features: float32 (k, l, n, d), of each block the class token and the mean
      patch (n is 2, or 1 of a backbone without class token), standardized, see
      `VisionTransformer.summarize`; None if not requested.
  """

  task_set: TaskSet
  logits: dict[str, np.ndarray]
  original: np.ndarray | None = None
  features: np.ndarray | None = None

  def probabilities(self, name: str) -> np.ndarray:
    """Probabilities of the classes of a task, float64 (k, c).

    Args:
      name: of a task; or "backbone", of the original outputs.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if its logits are not finite.
    """
    if name == BACKBONE and self.original is not None:
      return softmax(self.original, name)
    if name not in self.logits:
      raise UnknownTask(
        f"there are no predictions of {brief(name)}: expected one of "
        f"{name_list(list(self.logits), 32) or 'none'}.",
        tuple(self.logits),
      )
    return softmax(self.logits[name], name)

  def class_names(self, name: str) -> tuple[str, ...]:
    """Names of the classes of a task; empty if they are not known."""
    return () if name == BACKBONE else self.task_set.spec(name).class_names

  def top(self, name: str, count: int = 5) -> list[list[Guess]]:
    """The most probable classes of a task for each image, the best first.

    Args:
      name: see `probabilities`.
      count: of classes; fewer if the task has fewer.

    Raises:
      UnknownTask, TaskError: see `probabilities`.
      ConfigError: for a count below 1.
    """
    probabilities = self.probabilities(name)
    names = self.class_names(name)
    indices = best(probabilities, count)
    shares = np.take_along_axis(probabilities, indices, axis=-1)
    return [
      [
        Guess(class_label(names, index), index, share)
        for index, share in zip(*of_image, strict=True)
      ]
      for of_image in zip(indices.tolist(), shares.tolist(), strict=True)
    ]


def softmax(logits: Float[np.ndarray, "b c"], name: str) -> np.ndarray:
  """Probabilities of a task, float64 (b, c); refuses logits not finite."""
  if not np.isfinite(logits).all():
    raise TaskError(
      f"the outputs of {name!r} are not finite: its weights, or those of the "
      "backbone, cannot be used."
    )
  logits = logits.astype(np.float64)
  shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return shares / shares.sum(axis=-1, keepdims=True)


def best(probabilities: np.ndarray, count: int) -> np.ndarray:
  """Indices (b, count) of the best classes; of equal ones the first."""
  if count < 1:
    raise ConfigError(f"the number of classes is {count}, expected 1 or more.")
  return np.argsort(-probabilities, axis=-1, kind="stable")[:, :count]


def class_label(names: Sequence[str], index: int) -> str:
  """The name of a class, or its index if no names are known."""
  return names[index] if names else str(index)

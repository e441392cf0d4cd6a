"""Predictions: outputs, and the classes, labels or values of each task."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from memory_vit.errors import TaskError, UnknownTask
from memory_vit.kinds import TaskKind
from memory_vit.kinds import labels as label_kind
from memory_vit.kinds.guesses import Guess, best_guesses
from memory_vit.kinds.kind import Most
from memory_vit.model.task import BACKBONE
from memory_vit.prediction.task_set import TaskSet
from memory_vit.runtime.messages import brief, name_list


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Predictions:
  """The answers to k images, all of one set of tasks.

  Attributes:
    task_set: that answered.
    logits: {name of a task: float32 (k, c)}, the outputs of the heads of the
      requested tasks; of a task of values standardized.
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
    """Probabilities of the classes or labels of a task, float64 (k, c).

    Those of classes sum to 1; each label has its own.

    Args:
      name: of a task; or "backbone", of the original outputs.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if its outputs are not finite, or it is of values.
    """
    self._require_kind(name, "probabilities", "classes", "labels")
    return self.activated(name)

  def values(self, name: str) -> np.ndarray:
    """The values of a task, in its units (`TaskKind.units`), float64 (k, c).

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if its outputs are not finite, or it is not of values.
    """
    self._require_kind(name, "values", "values")
    return self.activated(name)

  def activated(self, name: str) -> np.ndarray:
    """`probabilities` or `values`, by the kind of the task."""
    outputs = self._finite_outputs(name)
    found: np.ndarray = self.kind(name).activate(outputs.astype(np.float64))
    return found

  def rejection(self, name: str) -> dict[str, np.ndarray]:
    """Which images are of no class of a task, see `TaskKind.rejection`.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if its outputs are not finite.
    """
    return self.kind(name).rejection(self._finite_outputs(name))

  def kind(self, name: str) -> TaskKind:
    """What the outputs of a task mean, see `TaskKind`."""
    return self.task_set.kind(name)

  def class_names(self, name: str) -> tuple[str, ...]:
    """Names of the outputs of a task; empty if they are not known."""
    return () if name == BACKBONE else self.task_set.spec(name).class_names

  def top(self, name: str, count: int = 5) -> list[list[Guess]]:
    """The most probable classes of a task for each image, the best first.

    Args:
      name: see `probabilities`.
      count: of classes; fewer if the task has fewer.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if its outputs are not finite, or it is not of classes.
      ConfigError: for a count below 1.
    """
    self._require_kind(name, "top", "classes")
    names, probabilities = self.class_names(name), self.activated(name)
    return best_guesses(names, probabilities, count)

  def labels(self, name: str) -> list[list[Guess]]:
    """The labels of each image, the most probable first.

    They are the labels at or above their thresholds, see
    `TaskKind`; an image may have none.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if its outputs are not finite, or it is not of labels.
    """
    self._require_kind(name, "labels", "labels")
    kind, names = self.kind(name), self.class_names(name)
    return label_kind.guesses(kind, names, self.activated(name))

  def answers(self, name: str, top: int) -> list[Any]:
    """The answers of a task as JSON, see `TaskKind.marked`."""
    found = self.kind(name).answers(
      self.class_names(name), self.activated(name), Most(top)
    )
    return self.marked(name, found)

  def marked(self, name: str, answers: list[Any]) -> list[Any]:
    """Answers of a task for all images, see `TaskKind.marked`."""
    return self.kind(name).marked(answers, self._finite_outputs(name))

  def _finite_outputs(self, name: str) -> np.ndarray:
    outputs = self._outputs(name)
    if not np.isfinite(outputs).all():
      raise TaskError(
        f"the outputs of {name!r} are not finite: its weights, or those of the "
        "backbone, cannot be used."
      )
    return outputs

  def _outputs(self, name: str) -> np.ndarray:
    if name == BACKBONE and self.original is not None:
      return self.original
    if name not in self.logits:
      raise UnknownTask(
        f"there are no predictions of {brief(name)}: expected one of "
        f"{name_list(list(self.logits), 32) or 'none'}.",
        tuple(self.logits),
      )
    return self.logits[name]

  def _require_kind(self, name: str, method: str, *expected: str) -> None:
    self._outputs(name)  # an unknown task has no kind
    kind = self.kind(name).kind
    if kind.name not in expected:
      raise TaskError(
        f"task {name!r} is of {kind.name}, and {method} is for tasks of "
        f"{' or '.join(expected)}: use {kind.reads}."
      )

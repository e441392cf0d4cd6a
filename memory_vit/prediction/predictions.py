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


@dataclasses.dataclass(frozen=True, eq=False)  # == of arrays is ambiguous
class Predictions:
  """Answers of one set of tasks to k images.

  Attributes:
    task_set: the set of tasks that answered.
    logits: {task name: float32 (k, c)}, the outputs of the heads of the
      requested tasks; standardized if the task predicts values.
    original: float32 (k, c0), the original outputs; None if not requested.
    features: float32 (k, l, n, d), standardized: for each block, the class
      token and the mean patch (n is 2), or, without class token, the mean patch
      (n is 1), see `VisionTransformer.summarize`; None if not requested.
  """

  task_set: TaskSet
  logits: dict[str, np.ndarray]
  original: np.ndarray | None = None
  features: np.ndarray | None = None

  def probabilities(self, name: str) -> np.ndarray:
    """Return probabilities of a task's classes or labels, float64 (k, c).

    Probabilities of classes sum to 1, those of labels are independent.

    Args:
      name: name of a task, or "backbone" for the original outputs.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if outputs are not finite, or the task predicts values.
    """
    self._require_kind(name, "probabilities", "classes", "labels")
    return self.activated(name)

  def values(self, name: str) -> np.ndarray:
    """Return a task's values in its `TaskKind.units`, float64 (k, c).

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if outputs are not finite, or the task predicts no values.
    """
    self._require_kind(name, "values", "values")
    return self.activated(name)

  def activated(self, name: str) -> np.ndarray:
    """Return `probabilities` or `values`, depending on the kind of the task."""
    outputs = self._finite_outputs(name)
    values: np.ndarray = self.kind(name).activate(outputs.astype(np.float64))
    return values

  def rejection(self, name: str) -> dict[str, np.ndarray]:
    """Return which images belong to no class, see `TaskKind.rejection`.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if outputs are not finite.
    """
    return self.kind(name).rejection(self._finite_outputs(name))

  def kind(self, name: str) -> TaskKind:
    """Return the description of a task's outputs."""
    return self.task_set.kind(name)

  def class_names(self, name: str) -> tuple[str, ...]:
    """Return the names of a task's outputs; empty if they are not known."""
    return () if name == BACKBONE else self.task_set.spec(name).class_names

  def top(self, name: str, count: int = 5) -> list[list[Guess]]:
    """Return the most probable classes for each image, the best first.

    Args:
      name: see `probabilities`.
      count: maximum number of classes for an image.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if outputs are not finite, or the task predicts no classes.
      ConfigError: for a count below 1.
    """
    self._require_kind(name, "top", "classes")
    names, probabilities = self.class_names(name), self.activated(name)
    return best_guesses(names, probabilities, count)

  def labels(self, name: str) -> list[list[Guess]]:
    """Return the labels of each image, the most probable first.

    A label is returned if its probability is at or above its threshold, see
    `TaskKind`; an image may have no labels.

    Raises:
      UnknownTask: for a task that was not requested.
      TaskError: if outputs are not finite, or the task predicts no labels.
    """
    self._require_kind(name, "labels", "labels")
    kind, names = self.kind(name), self.class_names(name)
    return label_kind.guesses(kind, names, self.activated(name))

  def answers(self, name: str, top: int) -> list[Any]:
    """Return the answers of a task as JSON, see `TaskKind.marked`."""
    answers = self.kind(name).answers(
      self.class_names(name), self.activated(name), Most(top)
    )
    return self.marked(name, answers)

  def marked(self, name: str, answers: list[Any]) -> list[Any]:
    """Add rejections to the answers for all images, see `TaskKind.marked`."""
    return self.kind(name).marked(answers, self._finite_outputs(name))

  def _finite_outputs(self, name: str) -> np.ndarray:
    outputs = self._outputs(name)
    if not np.isfinite(outputs).all():
      raise TaskError(
        f"the outputs of {name!r} are not finite: the weights of the task or "
        "the backbone cannot be used."
      )
    return outputs

  def _outputs(self, name: str) -> np.ndarray:
    if name == BACKBONE and self.original is not None:
      return self.original
    if name not in self.logits:
      raise UnknownTask(
        f"there are no predictions of {brief(name)}; the requested tasks are: "
        f"{name_list(list(self.logits), 32) or 'none'}.",
        tuple(self.logits),
      )
    return self.logits[name]

  def _require_kind(self, name: str, method: str, *expected: str) -> None:
    self._outputs(name)  # raises `UnknownTask` for an unknown task
    kind = self.kind(name).kind
    if kind.name not in expected:
      raise TaskError(
        f"task {name!r} is of {kind.name}, but `{method}` needs a task of "
        f"{' or '.join(expected)}: use {kind.reads} instead."
      )

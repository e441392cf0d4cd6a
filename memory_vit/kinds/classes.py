"""Classes: exactly one of c classes is right; softmax and cross-entropy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epy

from memory_vit.kinds.guesses import (
  best,
  best_guesses,
  class_label,
  guess_columns,
  guess_rows,
)
from memory_vit.kinds.kind import (
  Batch,
  HeadOutputs,
  HeldOut,
  Kind,
  LossOptions,
  Metric,
  Most,
  Names,
  Numbers,
)
from memory_vit.kinds.written import INDEX, class_of

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from memory_vit.kinds import class_sums, closed_form, temperature

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from memory_vit.kinds.closed_form import Solver
  from memory_vit.kinds.scores import Also, Scores
  from memory_vit.kinds.state import State
  from memory_vit.kinds.task_kind import TaskKind

# Logit of padding outputs. It is finite, because a target probability of 0
# times an infinite loss would be NaN.
_NEVER = -1e9


class MixedClasses(NamedTuple):
  """Two classes (b,) of each mixed image (mixup).

  The weights are `share` (b,), at least 0.5, and 1 - `share`.
  """

  first: jax.Array
  second: jax.Array
  share: jax.Array


class Classes(Kind):
  """Kind of tasks in which exactly one class of each image is right."""

  name, noun = "classes", "class"
  metrics = {
    "top1": Metric("top-1", "accuracy", is_share=True),
    "top5": Metric("top-5", "top-5 accuracy", is_share=True),
    "calibration_error": Metric(
      "calibration error", "expected calibration error", is_share=True
    ),
  }
  one_is_right = True
  options = (
    "data.per_class",
    "optim.class_weights",
    "optim.label_smoothing",
    "task.unknown",
  )
  stated = ("temperature", "unknown")
  fits = True
  target_type = "int32"
  label_form = (
    "an integer or the name of a class (for one-hot labels, the argmax)"
  )
  line_form = ("LABEL", INDEX, "0")
  wrong_target = "label is not a class"
  in_tables = ("top1", "top5")
  score_name = "accuracy"
  score_suffix = ""
  not_finite = "they count as mistakes, and there is no loss"
  activated_text = "probabilities of classes"
  reads = "probabilities or top"
  closed_forms = ("lda", "ridge")

  def _read(self, label: Any) -> int | str:
    return class_of(label)

  def meaning(self, names: Sequence[str], target: np.ndarray) -> str:
    return names[int(target)]

  def check(self, targets: np.ndarray, outputs: int) -> tuple[np.ndarray, str]:
    return (targets >= 0) & (targets < outputs), f"0 to {outputs - 1}"

  def counts(self, targets: np.ndarray, outputs: int) -> np.ndarray:
    return np.bincount(targets, minlength=outputs)

  def chance(self, outputs: int) -> float | None:
    return 1 / outputs

  def score_error(self, scores: Scores) -> float | None:
    if scores.score is None:
      return None
    return standard_error(scores.score, scores.examples)

  def table(
    self, metrics: Numbers, outputs: int, units: Names
  ) -> dict[str, str]:
    hidden = {} if tells_top5(outputs) else {"top5": None}
    return super().table({**metrics, **hidden}, outputs, units)

  def outputs_table(
    self, stated: TaskKind, names: Sequence[str]
  ) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return ("index", "class"), [(str(i), n) for i, n in enumerate(names)]

  def activate(self, stated: TaskKind, outputs: Any, xp: ModuleType) -> Any:
    outputs = outputs / stated.temperature
    shares = xp.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)

  def loss(
    self,
    outputs: jax.Array,
    targets: jax.Array | MixedClasses,
    options: LossOptions,
    head: HeadOutputs,
  ) -> tuple[jax.Array, jax.Array]:
    """Return cross-entropy (b,), and whether the right class is predicted.

    For mixed images, both are means over the two classes, weighted by share.
    """
    if head.is_class is not None:
      outputs = jnp.where(head.is_class[None], outputs, _NEVER)
    if not isinstance(targets, MixedClasses):
      return _loss(outputs, targets, options, head)
    first, second = (
      _loss(outputs, classes, options, head)
      for classes in (targets.first, targets.second)
    )
    loss, right = (
      targets.share * a + (1 - targets.share) * b
      for a, b in zip(first, second, strict=True)
    )
    return loss, right

  def fitted(
    self, stated: TaskKind, held_out: HeldOut, unknown: float
  ) -> TaskKind:
    calibrated = dataclasses.replace(
      stated, temperature=temperature.of_classes(*held_out)
    )
    if not unknown:
      return calibrated
    scores = self.known_score(held_out.outputs, np)
    return dataclasses.replace(
      calibrated, unknown=float(np.quantile(scores, unknown))
    )

  def known_score(self, outputs: Any, xp: ModuleType) -> Any:
    """Return the largest logit."""
    return outputs.max(axis=-1)

  def solver(self, method: str) -> Solver:
    return {
      "lda": closed_form.lda,
      "ridge": closed_form.ridge_of_classes,
    }[method]

  def weights(self, counts: np.ndarray, examples: int) -> np.ndarray:
    """Return weights n / (c * count), so that all classes contribute equally.

    If every class has examples, the mean weight over examples is 1, which keeps
    the scale of the loss. A class without examples has weight 0.
    """
    weights = counts.sum() / (len(counts) * counts.clip(1))
    return (weights * (counts > 0)).astype("float32")

  def state(
    self, stated: TaskKind, batch: Batch, mesh: Mesh, also: Collection[Also]
  ) -> State:
    return class_sums.ClassState(stated, batch, mesh, also)

  def answers(
    self, stated: TaskKind, names: Names, activated: np.ndarray, most: Most
  ) -> list[Any]:
    """Return [{"class", "index", "probability"}, ...] per image, best first."""
    guesses = best_guesses(names, activated, most.classes)
    return [[guess.to_json("class") for guess in row] for row in guesses]

  def answer_rows(self, answer: Any) -> list[tuple[str, str]]:
    if isinstance(answer, list):
      return guess_rows(answer, "class")
    # The task rejects images, so `TaskKind.marked` made `answer` a dictionary.
    unknown = [("unknown", "")] if answer["unknown"] else []
    return unknown + guess_rows(answer["classes"], "class")

  def columns(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, np.ndarray]:
    """Return all probabilities, and columns of the `top` best classes."""
    indices = best(activated, top)
    classes = [[class_label(names, i) for i in row] for row in indices.tolist()]
    shares = np.take_along_axis(activated, indices, axis=-1)
    return {
      "probabilities": activated.astype(np.float32),
      "top_indices": indices.astype(np.int32),
      "top_probabilities": shares.astype(np.float32),
      "top_classes": np.array(classes, str).reshape(indices.shape),
    }

  def cells(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, list[Any]]:
    guesses = best_guesses(names, activated, top)
    return guess_columns(guesses, self.cell_types(names, activated.shape[-1]))

  def cell_types(self, names: Sequence[str], outputs: int) -> dict[str, str]:
    return {
      "top_classes": "[string]",
      "top_indices": "[int32]",
      "top_probabilities": "[float32]",
    }

  def number_of_answers(
    self, stated: TaskKind, activated: np.ndarray, most: Most
  ) -> int:
    images, outputs = activated.shape
    return images * min(most.classes, outputs)


def standard_error(accuracy: float, examples: int) -> float:
  """Return the standard error of an accuracy; 0 without examples.

  The accuracy is kept half an example away from 0 and 1, so that the error is
  above 0.
  """
  if not examples:
    return 0.0
  share = min(max(accuracy, 0.5 / examples), 1 - 0.5 / examples)
  return math.sqrt(share * (1 - share) / examples)


def tells_top5(classes: int) -> bool:
  """Return whether "top5" can differ from 1: with up to 5 classes it cannot."""
  return classes > 5


def _loss(
  outputs: jax.Array,
  classes: jax.Array,
  options: LossOptions,
  head: HeadOutputs,
) -> tuple[jax.Array, jax.Array]:
  targets = _targets(
    classes, outputs.shape[-1], options.smoothing, head.is_class
  )
  loss = optax.softmax_cross_entropy(outputs, targets)
  if options.weighted:
    loss = loss * head.weights[classes]
  return loss, outputs.argmax(-1) == classes


def _targets(
  classes: jax.Array, c: int, smoothing: float, is_class: jax.Array | None
) -> jax.Array:
  """Return target probabilities (b, c), which are 0 for padding outputs."""
  sharp = jax.nn.one_hot(classes, c)
  if is_class is None:
    return optax.smooth_labels(sharp, smoothing)
  spread = is_class / is_class.sum()
  return (1 - smoothing) * sharp + smoothing * spread[None]

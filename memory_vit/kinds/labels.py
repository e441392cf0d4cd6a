"""Labels: any number of c labels is right; sigmoid and binary cross-entropy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.kinds.guesses import (
  Guess,
  best_guesses,
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
)
from memory_vit.kinds.written import INDEX, class_of, parts, row

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import numpy as np

  from memory_vit.kinds import closed_form, label_metrics, state, temperature
  from memory_vit.runtime import sharding

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from memory_vit.kinds.closed_form import Solver
  from memory_vit.kinds.scores import Also
  from memory_vit.kinds.state import State
  from memory_vit.kinds.task_kind import TaskKind

# If no threshold was fitted, labels of at least this probability are predicted.
THRESHOLD = 0.5


class Labels(Kind):
  """Kind of tasks in which any number of labels of each image is right."""

  name, noun = "labels", "label"
  label_form = "a list of numbers or names of labels, or an array of 0 and 1"
  line_form = ("LABELS", rb"-|" + INDEX + rb"(," + INDEX + rb")*", "0,3")
  wrong_target = "label is not 0 or 1"
  options = ("optim.class_weights", "optim.label_smoothing")
  stated = ("thresholds", "temperature")
  fits = True
  metrics = {
    "map": Metric("mAP", "mean average precision", is_share=True),
    "f1_macro": Metric("macro F1", "F1, mean over labels", is_share=True),
    "calibration_error": Metric(
      "calibration error", "calibration error", is_share=True
    ),
  }
  in_tables = ("map", "f1_macro")
  beside_score = ("f1_macro",)
  score_name = "mAP"
  not_finite = "no label is predicted for them, and there is no loss"
  activated_text = "probabilities of labels"
  reads = "probabilities or labels"

  def _read(self, label: Any) -> list[int | str] | np.ndarray:
    """Return a list of indices or names, or an array (a number per label)."""
    several = parts(label)
    dtype = np.asarray(several).dtype.kind
    are_indices = isinstance(several, list | tuple) and dtype in "iu"
    if dtype in "OSU" or are_indices or not len(several):
      return [class_of(item) for item in several]
    return row(several)

  def meaning(self, names: Sequence[str], target: np.ndarray) -> list[str]:
    return [names[int(i)] for i in np.flatnonzero(target)]

  def check(self, targets: np.ndarray, outputs: int) -> tuple[np.ndarray, str]:
    right = ((targets == 0) | (targets == 1)).all(axis=-1)
    return right, f"0 or 1 for each of {outputs:,}"

  def outputs_table(
    self, stated: TaskKind, names: Sequence[str]
  ) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    at = cut_offs(stated, len(names)).tolist()
    rows = [
      (name, str(i), f"{cut:.4g}")
      for i, (name, cut) in enumerate(zip(names, at, strict=True))
    ]
    return ("label", "index", "threshold"), rows

  def activate(self, stated: TaskKind, outputs: Any, xp: ModuleType) -> Any:
    return xp.exp(-xp.logaddexp(0, -outputs / stated.temperature))

  def loss(
    self,
    outputs: jax.Array,
    targets: jax.Array,
    options: LossOptions,
    head: HeadOutputs,
  ) -> tuple[jax.Array, jax.Array]:
    """Return binary cross-entropy (b, c), and correctness in [0, 1] (b, c)."""
    outputs = outputs[:, : targets.shape[-1]]  # drop padding outputs
    yes, no = jax.nn.softplus(-outputs), jax.nn.softplus(outputs)
    if options.weighted:
      yes = yes * head.weights[None]
    smooth = (1 - options.smoothing) * targets + options.smoothing / 2
    right = jnp.where(outputs >= 0, targets, 1 - targets)
    return smooth * yes + (1 - smooth) * no, right

  def fitted(
    self, stated: TaskKind, held_out: HeldOut, unknown: float
  ) -> TaskKind:
    """Fit the temperature, then thresholds on the calibrated probabilities."""
    kind = dataclasses.replace(
      stated, temperature=temperature.of_labels(*held_out)
    )
    counted = np.ones(len(held_out.targets), bool)
    at = label_metrics.evaluation_of_rows(kind, *held_out, counted).thresholds
    return dataclasses.replace(kind, thresholds=at)

  def solver(self, method: str) -> Solver:
    return closed_form.ridge_of_labels

  def weights(self, counts: np.ndarray, examples: int) -> np.ndarray:
    """Return weights that balance examples with and without each label.

    The weight is 1 for a label that all examples have, or no example has.
    """
    without = examples - counts
    weights = without / counts.clip(1)
    weights[(counts == 0) | (without == 0)] = 1
    return weights.astype("float32")

  def state(
    self, stated: TaskKind, batch: Batch, mesh: Mesh, also: Collection[Also]
  ) -> State:
    rows = sharding.to_host(tuple(batch))
    evaluation_of = functools.partial(label_metrics.evaluation_of_rows, stated)
    return state.OutputState(evaluation_of, rows)

  def answers(
    self, stated: TaskKind, names: Names, activated: np.ndarray, most: Most
  ) -> list[Any]:
    """Return {"labels": [{"label", "index", "probability"}, ...]} per image.

    Labels at or above their thresholds are listed, the most probable first.
    """
    rows = guesses(stated, names, activated, most.labels)
    return [{"labels": [g.to_json("label") for g in row]} for row in rows]

  def answer_rows(self, answer: Any) -> list[tuple[str, str]]:
    return guess_rows(answer["labels"], "label") or [("no label", "")]

  def columns(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, np.ndarray]:
    return {
      "probabilities": activated.astype(np.float32),
      "labels": chosen(stated, activated),
    }

  def cells(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, list[Any]]:
    rows = guesses(stated, names, activated)
    return guess_columns(rows, self.cell_types(names, activated.shape[-1]))

  def cell_types(self, names: Sequence[str], outputs: int) -> dict[str, str]:
    return {
      "labels": "[string]",
      "label_indices": "[int32]",
      "label_probabilities": "[float32]",
    }

  def number_of_answers(
    self, stated: TaskKind, activated: np.ndarray, most: Most
  ) -> int:
    """Count the predicted labels of all images, at least 1 for each image."""
    counts = chosen(stated, activated).sum(axis=-1)
    return int(counts.clip(1, most.labels or activated.shape[-1]).sum())


def cut_offs(stated: TaskKind, count: int) -> np.ndarray:
  """Return the thresholds of c labels, float64 (c,)."""
  return np.array(stated.thresholds or (THRESHOLD,) * count)


def chosen(stated: TaskKind, probabilities: np.ndarray) -> np.ndarray:
  """Return which labels are predicted, bool (..., c).

  Probabilities are compared in float32, as users of exported models do.
  """
  count = probabilities.shape[-1]
  at = cut_offs(stated, count).astype(np.float32)
  return probabilities.astype(np.float32) >= at


def guesses(
  stated: TaskKind,
  names: Sequence[str],
  probabilities: np.ndarray,
  most: int | None = None,
) -> list[list[Guess]]:
  """Return labels at or above their thresholds for each image, best first."""
  at_or_above = chosen(stated, probabilities)
  count = max(1, int(at_or_above.sum(axis=-1).max(initial=0)))
  count = min(count, most or count)
  # Labels below their thresholds get -1, so that they come last.
  rows = best_guesses(names, np.where(at_or_above, probabilities, -1), count)
  return [[g for g in row if g.probability >= 0] for row in rows]

"""Kinds of tasks: a class, several labels, or values of an image.

"classes"  exactly one of c classes is right: softmax, cross-entropy
"labels"   each of c labels is right or not: sigmoid, binary cross-entropy
"values"   c numbers: standardized, squared or Huber loss (regression)
"""

import dataclasses
import math
from types import ModuleType
from typing import Any, Literal

from etils import epy

from memory_vit.errors import TaskError

with epy.lazy_imports():  # options are checked without it
  import numpy as np

KindName = Literal["classes", "labels", "values"]
KINDS: tuple[KindName, ...] = ("classes", "labels", "values")
# Names for people of the score: the best step and early stopping use it, and
# higher is better.
SCORE_NAMES = {"classes": "accuracy", "labels": "mAP", "values": "R2"}
# Probability from which a label is predicted, if no validation has chosen one.
THRESHOLD = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskKind:
  """What the outputs of a head mean.

  Attributes:
    name: "classes", "labels" or "values".
    thresholds: of "labels", c probabilities from which a label is predicted,
      chosen on validation; empty if each is 0.5.
    mean: of "values", the c means of the training split.
    std: of "values", their c standard deviations, above 0. An output o is the
      value mean + std * o.
    units: of "values", c units such as "mm", or empty if they have none.
  """

  name: str = "classes"
  # Thousands of numbers would fill many screens.
  thresholds: tuple[float, ...] = dataclasses.field(default=(), repr=False)
  mean: tuple[float, ...] = dataclasses.field(default=(), repr=False)
  std: tuple[float, ...] = dataclasses.field(default=(), repr=False)
  units: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    if self.name not in KINDS:
      raise TaskError(
        f"the kind of a task is {self.name!r}, expected one of "
        f"{', '.join(KINDS)}."
      )
    fields = {"labels": ("thresholds",), "values": ("mean", "std", "units")}
    for field in ("thresholds", "mean", "std", "units"):
      if getattr(self, field) and field not in fields.get(self.name, ()):
        raise TaskError(f"a task of {self.name} has {field}: expected none.")
    numbers = (*self.thresholds, *self.mean, *self.std)
    if not all(map(math.isfinite, numbers)) or min(self.std, default=1) <= 0:
      raise TaskError(
        "thresholds, mean and std of a task are expected to be finite, and std "
        "above 0."
      )

  def require_outputs(self, count: int) -> None:
    """Raise `TaskError` unless it describes c outputs."""
    for field in ("thresholds", "mean", "std", "units"):
      found = len(getattr(self, field))
      if found not in (0, count):
        raise TaskError(f"it has {count} outputs, but {found} {field}.")
    if self.name == "values" and not (self.mean and self.std):
      raise TaskError("a task of values needs mean and std.")

  @property
  def is_classes(self) -> bool:
    """Whether one of its classes is right."""
    return self.name == "classes"

  @property
  def is_labels(self) -> bool:
    """Whether each of its labels is right or not."""
    return self.name == "labels"

  @property
  def is_values(self) -> bool:
    """Whether its outputs are standardized numbers."""
    return self.name == "values"

  def activate(self, logits: Any, xp: ModuleType = np) -> Any:
    """Probabilities of classes or labels, or values, of outputs (..., c).

    Values are float64 in NumPy, and float32 in JAX.

    Args:
      logits: outputs of the head, of any floating type.
      xp: `numpy` or `jax.numpy`, that of the array.
    """
    if self.is_labels:
      return xp.exp(-xp.logaddexp(0, -logits))
    if self.is_values:
      logits = xp.asarray(logits)
      axes = (1,) * (logits.ndim - 1)
      mean, std = (
        xp.asarray(numbers, float).reshape(*axes, -1)
        for numbers in (self.mean, self.std)
      )
      return mean + std * logits
    shares = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)

  def cut_offs(self, count: int) -> "np.ndarray":
    """The thresholds of c labels, float64 (c,)."""
    return np.array(self.thresholds or (THRESHOLD,) * count)

  def chosen(self, probabilities: "np.ndarray") -> "np.ndarray":
    """Which labels are predicted, bool (..., c).

    Compared in float32, as consumers of exports do.
    """
    cut_offs = self.cut_offs(probabilities.shape[-1]).astype(np.float32)
    return probabilities.astype(np.float32) >= cut_offs


CLASSES = TaskKind()

"""Description of the outputs of a task (`TaskKind`), and the kinds by name."""

import dataclasses
import math
from types import ModuleType
from typing import Any

from etils import epy

from memory_vit.errors import TaskError
from memory_vit.kinds.kind import THE_BEST, Kind, Metric, Most, Names

with epy.lazy_imports():  # checking options does not need NumPy
  import numpy as np

# Kinds by name. `kinds/__init__.py` fills the dictionary.
KINDS: dict[str, Kind] = {}
_STATED = ("thresholds", "mean", "std", "units")
# {field of `TaskKind` that holds a fitted number: its value without a fit}.
FITTED = {"temperature": 1.0, "unknown": None}
# Types of the columns of `TaskKind.rejection`, as in `Kind.cell_types`.
REJECTION_TYPES = {"unknown": "bool", "known_score": "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskKind:
  """Description of the outputs of a task.

  Attributes:
    name: name of the kind: "classes" (exactly one is right), "labels" (each is
      right or not) or "values" (numbers).
    thresholds: for "labels", c probabilities from which a label is predicted,
      chosen on validation; empty if all are 0.5.
    mean: for "values", c means over the training split.
    std: for "values", c standard deviations over the training split, above 0.
      An output o means the value mean + std * o.
    units: for "values", c units such as "mm", or empty if they have none.
    temperature: for "classes" and "labels", the number that divides outputs
      before the softmax or sigmoid, fitted on validation; 1 if none was fitted.
    unknown: for "classes", the `Kind.known_score` below which an image is of
      none of the classes; None if no image is rejected.
  """

  name: str = "classes"
  # The repr omits these fields: thousands of numbers would fill many screens.
  thresholds: tuple[float, ...] = dataclasses.field(default=(), repr=False)
  mean: tuple[float, ...] = dataclasses.field(default=(), repr=False)
  std: tuple[float, ...] = dataclasses.field(default=(), repr=False)
  units: tuple[str, ...] = ()
  temperature: float = 1.0
  unknown: float | None = None

  def __post_init__(self) -> None:
    if self.name not in tuple(KINDS):  # self.name may be unhashable
      raise TaskError(
        f"the kind of a task is {self.name!r}, expected one of "
        f"{', '.join(KINDS)}."
      )
    states = {f for f in _STATED if getattr(self, f)}
    states |= {f for f, none in FITTED.items() if getattr(self, f) != none}
    for field in (*_STATED, *FITTED):
      if field in states and field not in self.kind.stated:
        raise TaskError(f"a task of {self.name} cannot have {field}.")
    numbers = (*self.thresholds, *self.mean, *self.std)
    if not all(map(math.isfinite, numbers)) or min(self.std, default=1) <= 0:
      raise TaskError(
        "thresholds, mean and std of a task must be finite, and std must be "
        "above 0."
      )
    if not (math.isfinite(self.temperature) and self.temperature > 0):
      raise TaskError(
        f"the temperature of a task is {self.temperature}, expected a finite "
        "number above 0."
      )
    if self.unknown is not None and not math.isfinite(self.unknown):
      raise TaskError(
        f"the threshold 'unknown' of a task is {self.unknown}, expected a "
        "finite number, or None."
      )

  @property
  def kind(self) -> Kind:
    """The `Kind` of this name."""
    return KINDS[self.name]

  def require_outputs(self, count: int) -> None:
    """Raise `TaskError` unless the description fits `count` outputs."""
    for field in _STATED:
      entries = len(getattr(self, field))
      if entries not in (0, count):
        raise TaskError(
          f"{field} has {entries} entries, but the task has {count} outputs."
        )
    if not all(getattr(self, field) for field in self.kind.needed):
      raise TaskError(
        f"a task of {self.name} needs {' and '.join(self.kind.needed)}."
      )

  def rows(self) -> list[tuple[str, str]]:
    """Return a title and a text for each fitted number, for `inspect`."""
    rows = []
    if self.temperature != 1:
      rows.append(("temperature", f"{self.temperature:.4g}"))
    if self.unknown is not None:
      text = f"images whose largest output is below {self.unknown:.4g}"
      rows.append(("unknown", text))
    return rows

  def activate(self, logits: Any, xp: ModuleType = np) -> Any:
    """Convert outputs (..., c) to probabilities (classes, labels) or values.

    Values are float64 in NumPy, and float32 in JAX.

    Args:
      logits: outputs of the head, of any floating type.
      xp: `numpy` or `jax.numpy`, the module of the array.
    """
    return self.kind.activate(self, logits, xp)

  def answers(
    self, names: Names, activated: "np.ndarray", most: Most = THE_BEST
  ) -> list[Any]:
    """Return the answer to each image as JSON, see `Kind.answers`."""
    return self.kind.answers(self, names, activated, most)

  def rejection(self, outputs: "np.ndarray") -> "dict[str, np.ndarray]":
    """Return which images are of no class; {} if the task rejects none.

    Args:
      outputs: outputs of the head, (k, c).

    Returns:
      "known_score" float32 (k,), and "unknown" bool (k,), whether the score is
      below the threshold of the task.
    """
    if self.unknown is None:
      return {}
    scores = self.kind.known_score(outputs, np).astype(np.float32)
    return {
      "unknown": ~(scores >= np.float32(self.unknown)),
      "known_score": scores,
    }

  def marked(self, answers: list[Any], outputs: "np.ndarray") -> list[Any]:
    """Add "unknown" and "known_score" to answers if the task rejects images."""
    columns = {key: v.tolist() for key, v in self.rejection(outputs).items()}
    if not columns:
      return answers
    return [
      {self.name: answer, **dict(zip(columns, row, strict=True))}
      for answer, *row in zip(answers, *columns.values(), strict=True)
    ]


def answer_rows(answer: Any) -> list[tuple[str, str]]:
  """Return name and number of each entry of an answer of any kind, as text."""
  # A list is the answer of a task of classes that does not reject images. Any
  # other answer is a dictionary whose first key is the kind of the task.
  name = "classes" if isinstance(answer, list) else next(iter(answer))
  return KINDS[name].answer_rows(answer)


def answer_line(answer: Any) -> str:
  """Return the entries of an answer as one line of text."""
  return ", ".join(" ".join(row).rstrip() for row in answer_rows(answer))


def find_metric(key: str) -> Metric | None:
  """Return the metric with a key of `Scores.metrics`; None if there is none."""
  for kind in KINDS.values():
    if key in kind.metrics:
      return kind.metrics[key]
  return None

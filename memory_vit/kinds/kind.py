"""A kind of task: what the outputs of a head mean, and what follows from it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epy

from memory_vit.errors import DataError
from memory_vit.runtime.messages import brief

with epy.lazy_imports():
  import numpy as np

if TYPE_CHECKING:
  import jax
  from jax.sharding import Mesh

  from memory_vit.kinds.closed_form import Solver
  from memory_vit.kinds.scores import Also, Scores
  from memory_vit.kinds.state import State
  from memory_vit.kinds.task_kind import TaskKind
  from memory_vit.kinds.written import Label


Names = Sequence[str]  # of outputs
Numbers = Mapping[str, float | None]  # by the keys of metrics


@dataclasses.dataclass(frozen=True)
class Metric:
  """A number over the examples of a split.

  Attributes:
    title: for logs and tables.
    meaning: for people who do not know the title.
    is_share: whether it is written as a percentage.
  """

  title: str
  meaning: str
  is_share: bool = False

  def text(self, number: float | None) -> str:
    """The number for people; "-" if it is not known."""
    if number is None:
      return "-"
    return f"{100 * number:.2f} %" if self.is_share else f"{number:.4g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
  """The options of a loss on which its program depends."""

  smoothing: float = 0.0
  weighted: bool = False
  huber: bool = False


class Batch(NamedTuple):
  """Outputs of a head (b, c), what is right, and 1 or 0 for padding (b,)."""

  outputs: Any
  targets: Any  # (b,) or (b, c)
  mask: Any


class Most(NamedTuple):
  """Limits of an answer: of its classes, and of its labels; None for all."""

  classes: int
  labels: int | None = None


THE_BEST = Most(classes=1)


class HeldOut(NamedTuple):
  """Outputs for images that did not train a task, and what is right."""

  outputs: Any  # float32 (n, c)
  targets: Any  # (n,) or (n, c)


class HeadOutputs(NamedTuple):
  """Arrays of a loss that describe the outputs of a head."""

  is_class: Any = None  # bool (c,), False for padding; None if all are classes
  # float32 (c,), of classes, or of examples with a label; None if all are 1
  weights: Any = None


class Kind(abc.ABC):
  """Base class of the kinds of tasks; what a task states is an argument.

  Attributes:
    name: of the kind, as task files and options have it; a plural.
    noun: of one output.
    one_is_right: whether exactly one output of each image is right, so that
      images are hits or mistakes.
    numbers: whether outputs are numbers: they need no names, and the examples
      of one cannot be counted.
    target_type: the dtype of targets, (n,) if one is right, else (n, c).
    label_form: what a label is, for people.
    line_form: a label in a line of a list: its name, a pattern, an example.
    wrong_target: the problem of a target that `check` refuses.
    options: of a run, those that only some kinds use.
    stated: the fields of `TaskKind` that such a task may have.
    needed: those that it must have, which are measured on the training split.
    fits: whether `fitted` fits anything.
    metrics: by the keys of `Scores.metrics`; the first is the score.
    in_tables: those that tables of results show.
    beside_score: those that the summary of a run shows.
    score_name: for axes and headings.
    least_score: of all possible scores; None if there is none.
    trained_metric: the name of the metric beside the loss in training.
    not_finite: what outputs that are not finite mean for the metrics.
    outputs_text: what the outputs of a head are, for people; "" for logits.
    activated_text: what `activate` makes, for people.
    reads: methods of `Predictions` for such a task, for people.
    closed_forms: the methods of `solver`; the first is the default.
    hub_pipeline: the hub's name of what such a task does; "" if it has none.
  """

  name: str
  noun: str
  one_is_right: bool = False
  numbers: bool = False
  target_type: str = "float32"
  label_form: str
  line_form: tuple[str, bytes, str]
  wrong_target: str
  options: tuple[str, ...] = ()
  stated: tuple[str, ...] = ()
  needed: tuple[str, ...] = ()
  fits: bool = False
  metrics: Mapping[str, Metric]
  in_tables: tuple[str, ...]
  beside_score: tuple[str, ...] = ()
  score_name: str
  least_score: float | None = 0.0
  trained_metric: str = "accuracy"
  not_finite: str
  outputs_text: str = ""
  activated_text: str
  reads: str
  closed_forms: tuple[str, ...] = ("ridge",)
  hub_pipeline: str = "image-classification"

  def target_dtype(self, outputs: int) -> np.dtype:
    """The dtype of the target of an example: `target_type`, of c outputs."""
    shape = () if self.one_is_right else (outputs,)
    return np.dtype((self.target_type, shape))

  def read(self, label: Any) -> Label:
    """A label of Python or a table; a `DataError` begins with "its label"."""
    try:
      return self._read(label)
    except DataError:
      raise
    except (TypeError, ValueError, OverflowError, RecursionError):
      raise DataError(
        f"its label is {brief(label)}, expected {self.label_form}"
      ) from None

  @abc.abstractmethod
  def _read(self, label: Any) -> Label:
    """As `read`, but with any error."""

  @abc.abstractmethod
  def meaning(self, names: Sequence[str], target: np.ndarray) -> Any:
    """Describe the target of an example: a name, names, or numbers."""

  @abc.abstractmethod
  def check(self, targets: np.ndarray, outputs: int) -> tuple[np.ndarray, str]:
    """Check targets (b,) or (b, c): bool (b,), and what is expected."""

  def counts(self, targets: np.ndarray, outputs: int) -> np.ndarray:
    """The number of examples of each class or label, int64 (c,)."""
    return targets.sum(axis=0, dtype=np.int64)

  @property
  def score_key(self) -> str:
    """The key of the score in `Scores.metrics`."""
    return next(iter(self.metrics))

  @property
  def score(self) -> Metric:
    """The metric by which trials are ranked."""
    return self.metrics[self.score_key]

  @property
  def score_suffix(self) -> str:
    """Behind "validation" and "test" in headings."""
    return f" {self.score_name}"

  def chance(self, outputs: int) -> float | None:
    """The score of guessing uniformly among c outputs; None if unknown."""
    return None

  def score_error(self, scores: Scores) -> float | None:
    """The standard error of a score; None if it is not known."""
    return None

  def table(
    self, metrics: Numbers, outputs: int, units: Names
  ) -> dict[str, str]:
    """{title: number} of a row in a table of tasks of this kind."""
    return {
      self.metrics[key].title: self.metrics[key].text(metrics[key])
      for key in self.in_tables
    }

  @abc.abstractmethod
  def outputs_table(
    self, stated: TaskKind, names: Sequence[str]
  ) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The header and the rows of a table of all outputs."""

  @abc.abstractmethod
  def activate(self, stated: TaskKind, outputs: Any, xp: ModuleType) -> Any:
    """Activate the outputs (..., c) of a head, see `TaskKind.activate`."""

  @abc.abstractmethod
  def loss(
    self,
    outputs: jax.Array,
    targets: Any,
    options: LossOptions,
    head: HeadOutputs,
  ) -> tuple[jax.Array, jax.Array]:
    """The losses of a batch, and its numbers of `trained_metric`.

    Args:
      outputs: of the head (b, c), with padding.
      targets: of the batch, as `Split.labels` has them.
      options: of the loss.
      head: which outputs are padding, and their weights.
    """

  def fitted(
    self, stated: TaskKind, held_out: HeldOut, unknown: float
  ) -> TaskKind:
    """Fit what a trained task states, on images that it has not seen.

    Args:
      stated: by the task in training.
      held_out: the outputs, all finite, and what is right.
      unknown: the share of these images to reject; 0 rejects none.
    """
    return stated

  def head_for_training(
    self, stated: TaskKind, wanted: TaskKind, kernel: Any, bias: Any
  ) -> tuple[Any, Any]:
    """Convert a head (d, c), (c,) to the outputs that a loss takes.

    Args:
      stated: by the task of the head.
      wanted: by the task that is trained.
      kernel: of the head.
      bias: of the head.
    """
    return kernel / stated.temperature, bias / stated.temperature

  def known_score(self, outputs: Any, xp: ModuleType) -> Any:
    """Score how surely images are of any class: (..., c) -> (...)."""
    raise NotImplementedError  # of a kind that rejects no image

  @abc.abstractmethod
  def solver(self, method: str) -> Solver:
    """The solver of linear heads by one of `closed_forms`."""

  def weights(self, counts: np.ndarray, examples: int) -> np.ndarray:
    """Weights of c outputs by which all count alike, float32 (c,).

    Args:
      counts: examples of each output.
      examples: the number of examples.
    """
    raise NotImplementedError  # of a kind whose outputs have no counts

  def standardized(self, stated: TaskKind, targets: np.ndarray) -> np.ndarray:
    """The targets of a batch as the loss takes them."""
    return targets

  @abc.abstractmethod
  def state(
    self, stated: TaskKind, batch: Batch, mesh: Mesh, also: Collection[Also]
  ) -> State:
    """The metrics of a batch; every process must call.

    Args:
      stated: by the task.
      batch: on the devices of the mesh.
      mesh: over which the batch is split.
      also: what is asked for besides scores.
    """

  @abc.abstractmethod
  def answers(
    self, stated: TaskKind, names: Names, activated: np.ndarray, most: Most
  ) -> list[Any]:
    """The answer to each image as JSON, of what `activate` made, (k, c).

    Args:
      stated: by the task.
      names: of its outputs; may be empty.
      activated: for k images.
      most: how many are asked for.
    """

  @abc.abstractmethod
  def answer_rows(self, answer: Any) -> list[tuple[str, str]]:
    """Name and number of each entry of an answer, for people."""

  @abc.abstractmethod
  def number_of_answers(
    self, stated: TaskKind, activated: np.ndarray, most: Most
  ) -> int:
    """Count the entries of `answers`, of all images together."""

  @abc.abstractmethod
  def columns(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, np.ndarray]:
    """Columns of k rows, of what `activate` made; see `answers`."""

  @abc.abstractmethod
  def cells(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, list[Any]]:
    """Columns of files, of types that `cell_types` names."""

  @abc.abstractmethod
  def cell_types(self, names: Sequence[str], outputs: int) -> dict[str, str]:
    """{column: its type}, "float64", or "[float32]" for a list of such."""

  def explained(
    self, stated: TaskKind, found: np.ndarray, outputs: np.ndarray
  ) -> tuple[np.ndarray, float]:
    """Compare what an exported function computes with `activate`.

    Args:
      stated: by the task.
      found: by the function.
      outputs: of the head, which are right.

    Returns:
      The differences of outputs that would explain those of `found`, and the
      least size to which they are compared.
    """
    # A probability p changes by at most p times the change of its logits, which
    # are divided by the temperature.
    expected = self.activate(stated, outputs, np)
    changes = np.abs(found - expected) / expected.max()
    return changes * stated.temperature, 1.0

"""Base class of the kinds of tasks: losses, metrics, answers and texts."""

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


Names = Sequence[str]  # names of the outputs of a task
Numbers = Mapping[str, float | None]  # {key of a metric: number}


@dataclasses.dataclass(frozen=True)
class Metric:
  """Metric over the examples of a split.

  Attributes:
    title: name in logs and tables.
    meaning: explanation for people who do not know the title.
    is_share: whether its numbers are written as percentages.
  """

  title: str
  meaning: str
  is_share: bool = False

  def text(self, number: float | None) -> str:
    """Return a number as text; "-" if it is None."""
    if number is None:
      return "-"
    return f"{100 * number:.2f} %" if self.is_share else f"{number:.4g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
  """Options of a loss on which its compiled program depends."""

  smoothing: float = 0.0
  weighted: bool = False
  huber: bool = False


class Batch(NamedTuple):
  """Outputs of a head (b, c), targets, and a mask (b,), 0 for padding."""

  outputs: Any
  targets: Any  # (b,) or (b, c)
  mask: Any


class Most(NamedTuple):
  """Maximum numbers of classes and labels in an answer; None for all labels."""

  classes: int
  labels: int | None = None


THE_BEST = Most(classes=1)


class HeldOut(NamedTuple):
  """Outputs and targets of images on which the task was not trained."""

  outputs: Any  # float32 (n, c)
  targets: Any  # (n,) or (n, c)


class HeadOutputs(NamedTuple):
  """Mask of the padded outputs of a head, and weights of its outputs."""

  is_class: Any = None  # bool (c,), False for padding; None if no padding
  # float32 (c,): weights of classes or of positive labels; None if all are 1
  weights: Any = None


class Kind(abc.ABC):
  """Base class of the kinds of tasks; methods get the task's `TaskKind`.

  Attributes:
    name: plural noun that names the kind in task files and options.
    noun: word for one output.
    one_is_right: whether exactly one output of each image is right, so that
      predictions are hits or mistakes.
    numbers: whether outputs are numbers: they need no names, and examples are
      not counted per output.
    target_type: dtype of targets, (n,) if `one_is_right`, else (n, c).
    label_form: description of a valid label, for errors.
    line_form: placeholder, pattern and example of a label in a file list.
    wrong_target: name of the problem if `check` refuses a target.
    options: options of a run that this kind uses and some other kinds do not.
    stated: fields of `TaskKind` that a task of this kind may have.
    needed: fields that a task must have; measured on the training split.
    fits: whether `fitted` fits anything.
    metrics: metrics by their keys in `Scores.metrics`; the first is the score.
    in_tables: keys of the metrics that tables of results show.
    beside_score: keys of further metrics in the summary of a run.
    score_name: name of the score on axes and in headings.
    least_score: lowest possible score; None if scores have no lower bound.
    trained_metric: name of the metric that training logs beside the loss.
    not_finite: consequence of outputs that are not finite, as text.
    outputs_text: description of the outputs of a head; "" for logits.
    activated_text: description of what `activate` returns.
    reads: names of the methods of `Predictions` for this kind, as text.
    closed_forms: names of the methods of `solver`; the first is the default.
    hub_pipeline: pipeline name on the Hugging Face Hub; "" if there is none.
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
    """Return dtype and shape of the target of an example, for c outputs."""
    shape = () if self.one_is_right else (outputs,)
    return np.dtype((self.target_type, shape))

  def read(self, label: Any) -> Label:
    """Parse a label, or raise a `DataError` that does not name the example."""
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
    """Parse a label; `read` converts errors of this method to `DataError`."""

  @abc.abstractmethod
  def meaning(self, names: Sequence[str], target: np.ndarray) -> Any:
    """Describe the target of an example by a name, by names or by numbers."""

  @abc.abstractmethod
  def check(self, targets: np.ndarray, outputs: int) -> tuple[np.ndarray, str]:
    """Check targets (b,) or (b, c).

    Returns a mask (b,) of valid targets, and a text that says what is valid.
    """

  def counts(self, targets: np.ndarray, outputs: int) -> np.ndarray:
    """Count the examples of each class or label, int64 (c,)."""
    return targets.sum(axis=0, dtype=np.int64)

  @property
  def score_key(self) -> str:
    """Key of the score in `Scores.metrics`."""
    return next(iter(self.metrics))

  @property
  def score(self) -> Metric:
    """Metric by which trials are ranked."""
    return self.metrics[self.score_key]

  @property
  def score_suffix(self) -> str:
    """Text that follows "validation" and "test" in headings."""
    return f" {self.score_name}"

  def chance(self, outputs: int) -> float | None:
    """Return the score of uniform guessing among c outputs; None if unknown."""
    return None

  def score_error(self, scores: Scores) -> float | None:
    """Return the standard error of a score; None if unknown."""
    return None

  def table(
    self, metrics: Numbers, outputs: int, units: Names
  ) -> dict[str, str]:
    """Return {title: number as text} for a row in a table of tasks."""
    return {
      self.metrics[key].title: self.metrics[key].text(metrics[key])
      for key in self.in_tables
    }

  @abc.abstractmethod
  def outputs_table(
    self, stated: TaskKind, names: Sequence[str]
  ) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the header and the rows of a table of all outputs."""

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
    """Return the losses of a batch, and the values of `trained_metric`.

    Args:
      outputs: outputs of the head (b, c), with padding.
      targets: targets of the batch, as `standardized` returns them.
      options: options of the loss.
      head: which outputs are padding, and their weights.
    """

  def fitted(
    self, stated: TaskKind, held_out: HeldOut, unknown: float
  ) -> TaskKind:
    """Return `stated` with fitted fields, such as the temperature.

    Args:
      stated: description of the trained task.
      held_out: targets and finite outputs of images not used for training.
      unknown: share of these images to reject; 0 rejects none.
    """
    return stated

  def head_for_training(
    self, stated: TaskKind, wanted: TaskKind, kernel: Any, bias: Any
  ) -> tuple[Any, Any]:
    """Convert a head (d, c), (c,) to the initial head of another task.

    Args:
      stated: description of the task that has the head.
      wanted: description of the task that will be trained.
      kernel: kernel of the head.
      bias: bias of the head.
    """
    return kernel / stated.temperature, bias / stated.temperature

  def known_score(self, outputs: Any, xp: ModuleType) -> Any:
    """Score outputs (..., c); low scores (...) mean that no class is right."""
    raise NotImplementedError  # only kinds that reject images define it

  @abc.abstractmethod
  def solver(self, method: str) -> Solver:
    """Return the solver of linear heads for a method of `closed_forms`."""

  def weights(self, counts: np.ndarray, examples: int) -> np.ndarray:
    """Return weights float32 (c,) that balance rare and frequent targets.

    Args:
      counts: number of examples of each output.
      examples: number of examples of the split.
    """
    raise NotImplementedError  # only classes and labels define weights

  def standardized(self, stated: TaskKind, targets: np.ndarray) -> np.ndarray:
    """Return the targets of a batch in the form that the loss takes."""
    return targets

  @abc.abstractmethod
  def state(
    self, stated: TaskKind, batch: Batch, mesh: Mesh, also: Collection[Also]
  ) -> State:
    """Return the metric state of a batch; every process must call this.

    Args:
      stated: description of the task.
      batch: outputs, targets and mask on the devices of the mesh.
      mesh: mesh over which the batch is split.
      also: fields of `Evaluation` to compute besides the scores.
    """

  @abc.abstractmethod
  def answers(
    self, stated: TaskKind, names: Names, activated: np.ndarray, most: Most
  ) -> list[Any]:
    """Return the answer to each of k images as JSON.

    Args:
      stated: description of the task.
      names: names of its outputs; may be empty.
      activated: outputs (k, c) as `activate` returns them.
      most: maximum numbers of classes and labels in an answer.
    """

  @abc.abstractmethod
  def answer_rows(self, answer: Any) -> list[tuple[str, str]]:
    """Return name and number of each entry of an answer, as text."""

  @abc.abstractmethod
  def number_of_answers(
    self, stated: TaskKind, activated: np.ndarray, most: Most
  ) -> int:
    """Count the entries of `answers`, summed over all images."""

  @abc.abstractmethod
  def columns(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, np.ndarray]:
    """Return {column: array of k rows}; `top` limits the classes per image."""

  @abc.abstractmethod
  def cells(
    self, stated: TaskKind, names: Names, activated: np.ndarray, top: int
  ) -> dict[str, list[Any]]:
    """Return columns for files, as lists of the types in `cell_types`."""

  @abc.abstractmethod
  def cell_types(self, names: Sequence[str], outputs: int) -> dict[str, str]:
    """Return {column: type}, such as "float64", or "[float32]" for lists."""

  def explained(
    self, stated: TaskKind, found: np.ndarray, outputs: np.ndarray
  ) -> tuple[np.ndarray, float]:
    """Compare results of an exported function with results of `activate`.

    Args:
      stated: description of the task.
      found: activated outputs that the exported function has computed.
      outputs: correct outputs of the head.

    Returns:
      Differences of head outputs that would explain why the results differ,
      and a lower bound of the number by which the caller divides them.
    """
    # If a logit differs by d, its probability p differs by about
    # p * d / temperature. So d is about (difference of p) * temperature / p.
    # All differences are divided by the greatest p of the expected results.
    expected = self.activate(stated, outputs, np)
    changes = np.abs(found - expected) / expected.max()
    return changes * stated.temperature, 1.0

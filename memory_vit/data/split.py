"""Split of a data set, whose examples are read by index."""

import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from memory_vit.data import watchdog
from memory_vit.data.data_files import DataFiles
from memory_vit.data.embeddings import EmbeddedRows
from memory_vit.data.source import Source
from memory_vit.data.split_ref import OF_A_DIRECTORY
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.kinds import KINDS
from memory_vit.kinds.written import name_of
from memory_vit.runtime import messages, processes
from memory_vit.runtime.messages import escaped

logger = logging.getLogger(__name__)

# Number of examples that share a time limit: every time limit takes a thread.
_AT_ONCE = 64
# Maximum number of unreadable examples that a message lists.
_SHOWN = 20
T = TypeVar("T")


# eq=False, because == is ambiguous for arrays.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
  """One split of a data set, with random access.

  Examples are read by index, so training can resume at any example.

  Attributes:
    name: name of the data set, as in `config.data.name`.
    split: name of the split, such as "train[:98%]", as in `config.data.train`.
    size: number of examples.
    class_names: one name per class, label or value; "0", "1", ... if the data
      set states no names.
    kind: what a label is, see `TaskKind`: "classes", one class; "labels", 1 or
      0 for each of c labels; "values", c numbers.
    source: source that reads the examples.
    file_name: function: index -> name of the file of the example, or "".
    data_files: files of the split, in which a resumed run looks for changes.
    labels: labels of all examples, (size,) or (size, c), if they are known
      before examples are read.
    embedded: rows of embeddings, if the split has these instead of images.
    left_out: a line for each image that is left out for lack of an embedding.
    skipped: a line for each folder that holds files that are not images.
    columns: a line for each column of a table, with examples of cells.
    faults: problems because of which a run refuses the split.
    broken: {index: reason} of examples that were unreadable on opening.
    max_bad: maximum number of unreadable examples to skip.
    stall_timeout: seconds without a batch after which the process is ended; 0
      sets no limit.
    unreadable: {index: reason} of all unreadable examples that this process
      knows; it grows while examples are read.
  """

  name: str
  split: str
  size: int
  class_names: tuple[str, ...]
  source: Source
  kind: str = "classes"
  file_name: Callable[[int], str] = lambda index: ""
  data_files: DataFiles = dataclasses.field(default_factory=DataFiles)
  labels: np.ndarray | None = None
  embedded: EmbeddedRows | None = None
  left_out: tuple[str, ...] = ()
  skipped: tuple[str, ...] = ()
  columns: tuple[str, ...] = ()
  faults: tuple[str, ...] = ()
  broken: Mapping[int, str] = dataclasses.field(default_factory=dict)
  max_bad: int = 0
  stall_timeout: float = 0.0
  unreadable: dict[int, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    require_kind(self.kind, self)
    # Copy the dictionary: `dataclasses.replace` would let two splits share it.
    object.__setattr__(self, "unreadable", dict(self.unreadable))

  @property
  def num_classes(self) -> int:
    """Number of classes, labels or values."""
    return len(self.class_names)

  @property
  def label_dtype(self) -> np.dtype:
    """Dtype of a label: int32, float32 (c,), or float64 (c,)."""
    return KINDS[self.kind].target_dtype(self.num_classes)

  @property
  def directory(self) -> str:
    """Folder name of a data set of `OF_A_DIRECTORY`, otherwise ""."""
    if self.name not in OF_A_DIRECTORY:
      return ""
    for name, path in self.data_files.files.items():
      root = path.removesuffix(name)
      return os.path.basename(os.path.abspath(root)) if root else ""
    return ""

  @property
  def full_name(self) -> str:
    """Name of the data set in messages, such as "digits" or "folder pets"."""
    return f"{self.name} {self.directory}".rstrip()

  def __str__(self) -> str:
    """Return the name of the split for messages."""
    return f"data set {self.full_name!r}, split {self.split!r}"

  def describe(self, index: int) -> str:
    """Name an example in a message."""
    where = f"{self}, example {index}"
    file = escaped(self.file_name(index))
    return f"{where} ({file})" if file else where

  def require_images(self) -> None:
    """Raise `DataError` if the split has embeddings instead of images."""
    if self.embedded:
      raise DataError(
        f"{self} holds embeddings and no images: set config.cache.what to "
        "'features'. Only heads and probes can be trained on features."
      )

  def single_class(self) -> str:
    """Return advice for a split with a single class, otherwise "".

    A single label or value needs no advice, because it can be trained.
    """
    if self.num_classes > 1 or not KINDS[self.kind].one_is_right:
      return ""
    if self.name != "folder":
      return "expected two or more."
    return (
      "expected two or more. The folders in DATA/train are the classes: "
      "DATA/train/CLASS/IMAGE. If the images are one folder deeper, in "
      f"DATA/train/{escaped(self.class_names[0])}/CLASS, move these folders up."
    )

  def check_labels(
    self, labels: np.ndarray, index_of: Callable[[int], int] = int
  ) -> None:
    """Raise if labels are not valid for the kind of this split.

    Args:
      labels: (b,) for classes, otherwise (b, c).
      index_of: function: place in `labels` -> index of the example.

    Raises:
      BrokenDataError: if a class is outside of 0 ... num_classes - 1, if a
        label is neither 0 nor 1, or if a value exceeds the range of float32.
    """
    kind = KINDS[self.kind]
    right, expected = kind.check(labels, self.num_classes)
    wrong = np.flatnonzero(~right)
    if not wrong.size:
      return
    label = labels[wrong[0]].tolist()
    reason = ": an unlabelled test split" if label == -1 else ""
    noun = "values" if kind.numbers else "labels"
    raise BrokenDataError(
      f"{self} has {noun} {messages.brief(label)}{reason}; "
      f"expected {expected}. Use another split. "
      f"(Found in {self.describe(index_of(int(wrong[0])))}.)"
    )

  def numbered_as(self, class_names: tuple[str, ...]) -> "Split":
    """Number classes as a task does, if the task has all classes of the split.

    Older tasks may order the classes differently, and may have more classes.
    """
    known = {name_of(name): i for i, name in enumerate(class_names)}
    known_all = known.keys() >= {*self.class_names}
    if not KINDS[self.kind].one_is_right or not known_all:
      return self
    places = np.array([known[name] for name in self.class_names], np.int32)
    return dataclasses.replace(
      self,
      class_names=class_names,
      source=self.source.renumbered(places),
      labels=None if self.labels is None else places[self.labels],
    )

  def mark_unreadable(self, reasons: Mapping[int, str]) -> None:
    """Skip unreadable examples, {index: reason}, from now on; log each once.

    Raises:
      BrokenDataError: if more than `max_bad` examples are unreadable in total.
    """
    new = {i: why for i, why in reasons.items() if i not in self.unreadable}
    if new and len(self.unreadable) + len(new) > self.max_bad:
      together = {**self.unreadable, **new}
      lines = [self._line(i, why) for i, why in together.items()]
      named = not self.name.startswith("python:")
      raise BrokenDataError(_too_many(lines, self.max_bad, named))
    for index, why in new.items():
      line = self._line(index, why)
      logger.warning("skipped (at most %d): %s", self.max_bad, line)
    self.unreadable.update(new)

  @property
  def skips(self) -> dict[int, int]:
    """{unreadable index: steps to the next index that may be readable}."""
    if len(self.unreadable) >= self.size:
      raise self.nothing_readable()
    steps: dict[int, int] = {}
    for index in sorted(self.unreadable, reverse=True) * 2:
      steps[index] = 1 + steps.get((index + 1) % self.size, 0)
    return steps

  def sync_unreadable(self) -> list[int]:
    """Share the unreadable examples of all processes; all processes must call.

    Returns:
      The indices of all unreadable examples, sorted.

    Raises:
      BrokenDataError: if there are more than `max_bad`.
    """
    if not self.max_bad:
      return []
    indices = processes.union_over_processes(self.unreadable)
    self.mark_unreadable(
      dict.fromkeys(indices, "another process could not read it")
    )
    return indices

  def time_limit(self, first: int) -> contextlib.AbstractContextManager[None]:
    """End the process if the body, which reads from `first` on, stalls."""
    examples = f"{self}, from example {first} on"
    return watchdog.limit(self.stall_timeout, examples)

  def in_time(self, elements: Iterable[T]) -> Iterator[T]:
    """Yield `elements`, one for each example; end the process if they stall."""
    left = iter(elements)
    for first in range(0, self.size, _AT_ONCE):
      with self.time_limit(first):
        chunk = list(itertools.islice(left, _AT_ONCE))
      yield from chunk

  def nothing_readable(self) -> BrokenDataError:
    """Return the error for a split without any readable example."""
    reasons = sorted(self.unreadable.items())[:1]
    first = "".join(f" {self._line(index, why)}" for index, why in reasons)
    return BrokenDataError(
      f"{self}: none of its {self.size} examples can be read.{first}"
    )

  def _line(self, index: int, why: str) -> str:
    return f"{self.describe(index)} cannot be read: {why}."


def require_kind(kind: str, where: Any) -> None:
  """Raise `DataError` unless `kind` is the name of a kind of task."""
  if kind not in tuple(KINDS):  # a tuple, as `kind` may be unhashable
    raise DataError(
      f"{where}: the kind is {messages.brief(kind)}, expected one of "
      f"{', '.join(KINDS)}."
    )


def _too_many(lines: list[str], allowed: int, named: bool) -> str:
  """Return an error message with `lines`, one for each unreadable example.

  If `named`, the message recommends the command `check_data`.
  """
  advice = f"config.data.max_bad ({allowed}) limits how many are skipped."
  if named:
    advice = f"`memory-vit check_data` lists all broken examples; {advice}"
  if len(lines) == 1:
    return f"{lines[0]} {advice}"
  shown = lines[:_SHOWN]
  if len(lines) > _SHOWN:
    shown.append(f"and {len(lines) - _SHOWN} more")
  return "\n  ".join(
    [f"{len(lines)} examples cannot be read. {advice}", *shown]
  )

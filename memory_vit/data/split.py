"""A split of a data set: examples that are read by their numbers."""

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

# Examples that share a time limit, which costs a thread.
_AT_ONCE = 64
# Unreadable examples that a message lists.
_SHOWN = 20
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # it holds arrays
class Split:
  """One split of a data set, with random access.

  Example i can be fetched by itself, so the position in training is a single
  number.

  Attributes:
    name: of the data set, as in `config.data.name`.
    split: as in `config.data.train`, such as "train[:98%]".
    size: number of examples.
    class_names: one per class, label or value; "0", "1", ... if the data set
      names none.
    kind: what a label is, see `TaskKind`: "classes", one class; "labels", 1 or
      0 for each of c labels; "values", c numbers.
    source: reads its examples.
    file_name: index -> the file of the example, or "".
    data_files: its files, to notice later that they have changed.
    labels: of all examples, (size,) or (size, c), if they are known before
      examples are read.
    embedded: rows of embeddings, for a split that has them in place of images.
    left_out: a line for each image that is no example, as it has no embedding.
    skipped: a line for each of its folders that holds more than images.
    columns: a line for each column of its tables, with examples of cells.
    faults: problems for which a run refuses it.
    broken: {index: why} of the examples that opening it found unreadable.
    max_bad: maximum number of unreadable examples to skip.
    stall_timeout: seconds without a batch after which the process is ended; 0
      is never.
    unreadable: {index: why} of the unreadable examples that this process knows;
      it grows while examples are read.
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
    # `dataclasses.replace` makes a split that grows by itself.
    object.__setattr__(self, "unreadable", dict(self.unreadable))

  @property
  def num_classes(self) -> int:
    """The number of classes, labels or values."""
    return len(self.class_names)

  @property
  def label_dtype(self) -> np.dtype:
    """The dtype of a label: int32, float32 (c,), or float64 (c,)."""
    return KINDS[self.kind].target_dtype(self.num_classes)

  @property
  def directory(self) -> str:
    """The last name of its directory; "" for a data set with its own name."""
    if self.name not in OF_A_DIRECTORY:
      return ""
    for name, path in self.data_files.files.items():
      root = path.removesuffix(name)
      return os.path.basename(os.path.abspath(root)) if root else ""
    return ""

  @property
  def full_name(self) -> str:
    """The name of the data set for people: "digits", "folder pets"."""
    return f"{self.name} {self.directory}".rstrip()

  def __str__(self) -> str:
    """For messages."""
    return f"data set {self.full_name!r}, split {self.split!r}"

  def describe(self, index: int) -> str:
    """Name one example in a message."""
    where = f"{self}, example {index}"
    file = escaped(self.file_name(index))
    return f"{where} ({file})" if file else where

  def require_images(self) -> None:
    """Raise `DataError` if it has embeddings in place of images."""
    if self.embedded:
      raise DataError(
        f"{self} holds embeddings and no images: heads and probes alone are "
        "trained on them, by config.cache.what 'features'."
      )

  def single_class(self) -> str:
    """Say what to do about a single class; "" if there are several.

    A single label or value can be learned.
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
    """Refuse labels that are not of its kind.

    Args:
      labels: (b,) of classes, else (b, c).
      index_of: place in `labels` -> index of the example.

    Raises:
      BrokenDataError: if a class is outside of 0 ... num_classes - 1, a label
        neither 0 nor 1, or a value beyond the range of float32.
    """
    kind = KINDS[self.kind]
    right, expected = kind.check(labels, self.num_classes)
    wrong = np.flatnonzero(~right)
    if not wrong.size:
      return
    label = labels[wrong[0]].tolist()
    reason = ": an unlabelled test split" if label == -1 else ""
    found = "values" if kind.numbers else "labels"
    raise BrokenDataError(
      f"{self} has {found} {messages.brief(label)}{reason}; "
      f"expected {expected}. Use another split. "
      f"(Found in {self.describe(index_of(int(wrong[0])))}.)"
    )

  def numbered_as(self, class_names: tuple[str, ...]) -> "Split":
    """The split with the class numbers of a task, if that has its classes.

    Older tasks have other orders, and classes without images.
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
    """Leave out unreadable examples, {index: why}; each is logged once.

    Raises:
      BrokenDataError: if there are more than `max_bad`, with those before.
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
    """{unreadable index: steps to the next that is not known to be one}."""
    if len(self.unreadable) >= self.size:
      raise self.nothing_readable()
    steps: dict[int, int] = {}
    for index in sorted(self.unreadable, reverse=True) * 2:
      steps[index] = 1 + steps.get((index + 1) % self.size, 0)
    return steps

  def sync_unreadable(self) -> list[int]:
    """Share the unreadable examples of all processes; all must call.

    Returns:
      Their indices, sorted.

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
    """End the process if reading from example `first` on stalls."""
    what = f"{self}, from example {first} on"
    return watchdog.limit(self.stall_timeout, what)

  def in_time(self, elements: Iterable[T]) -> Iterator[T]:
    """Yield what `source` makes of each example.

    If that stalls, the process is ended, as in training.
    """
    left = iter(elements)
    for first in range(0, self.size, _AT_ONCE):
      with self.time_limit(first):
        chunk = list(itertools.islice(left, _AT_ONCE))
      yield from chunk

  def nothing_readable(self) -> BrokenDataError:
    """The error for a split of which no example can be read."""
    found = sorted(self.unreadable.items())[:1]
    first = "".join(f" {self._line(index, why)}" for index, why in found)
    return BrokenDataError(
      f"{self}: none of its {self.size} examples can be read.{first}"
    )

  def _line(self, index: int, why: str) -> str:
    return f"{self.describe(index)} cannot be read: {why}."


def require_kind(kind: str, where: Any) -> None:
  """Raise `DataError` unless it is the name of a kind of task."""
  if kind not in tuple(KINDS):  # which asks for no hash
    raise DataError(
      f"{where}: its kind is {messages.brief(kind)}, expected one of "
      f"{', '.join(KINDS)}."
    )


def _too_many(lines: list[str], allowed: int, named: bool) -> str:
  """The message; `named` if `memory-vit check_data` can open the data set."""
  advice = f"config.data.max_bad ({allowed}) is how many may be left out."
  if named:
    advice = f"`memory-vit check_data` names all that is broken; {advice}"
  if len(lines) == 1:
    return f"{lines[0]} {advice}"
  shown = lines[:_SHOWN]
  if len(lines) > _SHOWN:
    shown.append(f"and {len(lines) - _SHOWN} more")
  return "\n  ".join(
    [f"{len(lines)} examples cannot be read. {advice}", *shown]
  )

"""Encode labels as numbers; `kinds.written` parses their texts.

If the data set states its classes, a number is the index of a class; otherwise
it is the name of a class, as "007" always is. Both readings agree if no number
from 0 to the greatest is missing, since such names are in numeric order.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from etils import epy

from memory_vit.errors import BrokenDataError, DataError
from memory_vit.kinds import KINDS
from memory_vit.kinds.written import DECIMAL, Label, name_of
from memory_vit.runtime import messages

with epy.lazy_imports():  # only the extra `train` installs psutil
  import psutil

logger = logging.getLogger(__name__)

MOST_CLASSES = 2**20
_ONE_FOR_EACH = (
  "give booleans, such as [true, false] or list<bool> of Parquet, or an "
  "array of NumPy"
)
# Pattern of a number; "007" is a name, because it has leading zeros.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,99}")
# Pattern of an integer that is written as a float, such as "7.0": pandas turns
# a column of integers into floats if a cell is missing.
_WHOLE = re.compile(rf"({_NUMBER.pattern})\.0+")


def in_order(names: Iterable[str]) -> tuple[str, ...]:
  """Sort unique names, by value if all are numbers."""
  unique = {*names}
  are_numbers = all(map(_NUMBER.fullmatch, unique))
  return tuple(sorted(unique, key=int) if are_numbers else sorted(unique))


def names_among(labels: Iterable[Label]) -> tuple[str, ...]:
  """Return the names in labels, in order; "0", "1", ... for arrays."""
  names: set[str] = set()
  for label in labels:
    if isinstance(label, np.ndarray):
      return tuple(map(str, range(len(label))))
    names.update(map(str, label if isinstance(label, list) else [label]))
  if not names:
    raise DataError("no example has a label: list the names of all labels")
  if all(_NUMBER.fullmatch(name) or _WHOLE.fullmatch(name) for name in names):
    names = {name.partition(".")[0] for name in names}
  elif all(map(DECIMAL.fullmatch, names)) and not all(map(str.isdigit, names)):
    decimal = min(name for name in names if not name.isdigit())
    raise DataError(
      f"the label {decimal} is not a class. To predict numbers, set "
      "config.task.kind to 'values'. If -1 marks images without a label, drop "
      "these images. If the labels are names of classes, list the names of all "
      "classes"
    )
  if len(names) > MOST_CLASSES:
    raise DataError(
      f"found {len(names):,} distinct labels, expected at most {MOST_CLASSES:,}"
    )
  return in_order(names)


def are_names(names: Sequence[str], labels: Iterable[Label]) -> bool:
  """Return whether numbers in labels are class names instead of indices."""
  if not _are_other_numbers(names):
    return False
  lists = (label if isinstance(label, list) else [label] for label in labels)
  numbers = {n for items in lists for n in items if isinstance(n, int)}
  return numbers <= {*map(int, names)}


@functools.cache
def tell_of_numbers(names: tuple[str, ...], where: str) -> None:
  """Log once if inferred names are numbers, but not 0, 1, 2, ... in order."""
  if _are_other_numbers(names):
    logger.warning(
      "%s: some numbers from 0 to %s are not labels, so the labels %s are read "
      "as names of classes, in numeric order", where, names[-1],
      messages.name_list(names),
    )  # fmt: skip


def _are_other_numbers(names: Sequence[str]) -> bool:
  """Return whether all names are numbers, but not 0, 1, 2, ... in order."""
  are_numbers = all(map(_NUMBER.fullmatch, names))
  return are_numbers and [*names] != [*map(str, range(len(names)))]


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes the labels of a data set whose names are known.

  Attributes:
    kind: kind of the labels.
    names: names of classes, labels or values.
    numbers_are_names: whether numbers are names; otherwise they are indices.
  """

  kind: str
  names: Sequence[str]
  numbers_are_names: bool = False

  @functools.cached_property
  def dtype(self) -> np.dtype:
    """Dtype of an encoded label, see `Kind.target_dtype`."""
    return KINDS[self.kind].target_dtype(len(self.names))

  @functools.cached_property
  def _places(self) -> dict[str, int]:
    return {name_of(name): i for i, name in enumerate(self.names)}

  def all(
    self, labels: Collection[Label], place: Callable[[int], str]
  ) -> np.ndarray:
    """Encode labels; an error begins with the `place` of the bad label."""
    self._require_memory(len(labels))
    self._require_numbers(labels)
    encoded = np.empty(len(labels), self.dtype)
    for i, label in enumerate(labels):
      try:
        encoded[i] = self(label)
      except DataError as error:
        raise BrokenDataError(f"{place(i)}: {error}.") from None
    return encoded

  def _require_memory(self, examples: int) -> None:
    # Count the array of labels twice, because TensorFlow copies the array.
    needed = 2 * examples * self.dtype.itemsize
    free = psutil.virtual_memory().available
    if needed > free:
      raise DataError(
        f"{examples:,} examples with {len(self.names):,} {self.kind} each take "
        f"{needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free: "
        f"expected fewer examples or fewer {self.kind}."
      )

  def _require_numbers(self, labels: Collection[Label]) -> None:
    """Raise if all labels are [0, 1] or [1, 0], and at least one is [1, 0].

    These labels are ambiguous: [1, 0] may be two indices, or multi-hot.
    """
    pairs = [0, 1], [1, 0]
    are_pairs = all(isinstance(e, list) and e in pairs for e in labels)
    if are_pairs and pairs[1] in labels:
      raise BrokenDataError(
        "every label is [0, 1] or [1, 0], which is ambiguous: the two numbers "
        "may be indices, or a multi-hot label. For multi-hot labels, "
        f"{_ONE_FOR_EACH}."
      )

  def __call__(self, label: Label) -> int | np.ndarray:
    """Return a class index or an array (c,).

    The text of an error begins with "its label", because callers put the name
    of the example before it.
    """
    count = len(self.names)
    if isinstance(label, int | str):
      return self._number(label)
    if isinstance(label, np.ndarray):
      if len(label) != count:
        raise DataError(
          f"its label has {len(label):,} numbers, expected {count:,}, one for "
          f"each of the {self.kind} {messages.name_list(self.names)}"
        )
      return label
    row = np.zeros(count, np.float32)
    row[[self._number(item) for item in label]] = 1
    if row.sum() < len(label):
      raise DataError(
        f"its label is {messages.brief(label)}, a list that names one label "
        f"twice. If the list is multi-hot, {_ONE_FOR_EACH}"
      )
    return row

  def _number(self, label: int | str) -> int:
    index: int | None = None
    if isinstance(label, int) and not self.numbers_are_names:
      index = label
    else:
      name = str(label)
      if name not in self._places and (whole := _WHOLE.fullmatch(name)):
        name = whole[1]
      index = self._places.get(name)
      if index is None and not self.numbers_are_names:
        index = int(name) if _NUMBER.fullmatch(name) else None
    if index is None or not 0 <= index < len(self.names):
      numbers = f"0 to {len(self.names) - 1:,}, or "
      raise DataError(
        f"its label is {messages.brief(label)}, expected "
        f"{numbers * (not self.numbers_are_names)}one of the {self.kind} "
        f"{messages.name_list(self.names)}"
      )
    return index

"""Labels as people write them: numbers and names of classes, lists, values.

In a text, several are separated by "|", or else by ","; "-" is none. A text
that begins with "[" is JSON, in which names may have any character.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime import messages

MOST_CLASSES = 2**20
# A class; several labels; or float64 (c,): values, or 1 and 0 for each label.
Label = int | str | list[int | str] | np.ndarray

_EXPECTED = {
  "classes": "an integer or the name of a class (of one-hot labels, the "
  "argmax)",
  "labels": "a list of numbers or names of labels, or an array of 0 and 1",
  "values": "a number, or several",
}


def read(label: Any, kind: str) -> Label:
  """A label of Python or of a table; a `DataError` begins with "its label"."""
  several = label
  try:
    if kind == "classes":
      return _class(label)
    if isinstance(label, str | bytes):
      several = _separated(_text(label))
    elif np.ndim(label) == 0:
      several = [np.asarray(label).item()]
    return _several(several) if kind == "labels" else _row(several)
  except (TypeError, ValueError, OverflowError, RecursionError):
    raise DataError(
      f"its label is {messages.brief(label)}, expected {_EXPECTED[kind]}"
    ) from None


def dtype_of(kind: str, count: int) -> np.dtype:
  """The dtype of an encoded label: int32, float32 (c,), or float64 (c,)."""
  if kind == "classes":
    return np.dtype(np.int32)
  # Values are standardized before they become float32: in float32, Unix times
  # of one minute are equal.
  return np.dtype((np.float64 if kind == "values" else np.float32, (count,)))


def names_among(
  labels: Iterable[Label], numbers_in_text: bool = True
) -> tuple[str, ...]:
  """The names among labels, sorted, or "0" up to the greatest number.

  With `numbers_in_text`, texts are numbers if all of them look like numbers.
  """
  found: set[int | str] = set()
  for label in labels:
    if isinstance(label, np.ndarray):
      return tuple(map(str, range(len(label))))
    found.update(label if isinstance(label, list) else [label])
  names = {each for each in found if isinstance(each, str)}
  if not found:
    raise DataError("no example has a label: expected the names of all labels")
  if names and not (numbers_in_text and all(map(_is_number, names))):
    return tuple(sorted(names))
  return tuple(map(str, range(min(max(map(int, found)) + 1, MOST_CLASSES))))


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes the labels of a data set, whose names are known."""

  kind: str
  names: Sequence[str]

  @functools.cached_property
  def _places(self) -> dict[str, int]:
    return {name: i for i, name in enumerate(self.names)}

  def all(
    self, labels: Iterable[Label], place: Callable[[int], str]
  ) -> np.ndarray:
    """Encode many; a `BrokenDataError` begins with the place of a label."""
    encoded = []
    for i, label in enumerate(labels):
      try:
        encoded.append(self(label))
      except DataError as error:
        raise BrokenDataError(f"{place(i)}: {error}.") from None
    dtype = dtype_of(self.kind, len(self.names))
    return np.array(encoded, dtype.base).reshape(-1, *dtype.shape)

  def __call__(self, label: Label) -> int | np.ndarray:
    """The class, or numbers (c,); a `DataError` begins with "its label"."""
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
    row[[self._number(each) for each in label]] = 1
    if row.sum() < len(label):
      raise DataError(
        f"its label is {messages.brief(label)}, which has one label twice (a 1 "
        "or 0 for each label is expected in an array, not in a list)"
      )
    return row

  def _number(self, label: int | str) -> int:
    found = label
    if isinstance(label, str):  # a name, else a number in a text
      number = int(label) if _is_number(label) else -1
      found = self._places.get(label, number)
    if not isinstance(found, int) or not 0 <= found < len(self.names):
      raise DataError(
        f"its label is {messages.brief(label)}, expected 0 to "
        f"{len(self.names) - 1:,}, or one of the {self.kind} "
        f"{messages.name_list(self.names)}"
      )
    return found


def _class(label: Any) -> int | str:
  array = np.asarray(label)
  value = array.item() if array.ndim == 0 else label
  value = _text(value) if isinstance(value, bytes) else value
  if not isinstance(value, int | str) or value == "":
    raise TypeError
  return value


def _several(label: Any) -> list[int | str] | np.ndarray:
  """Numbers or names in a list; of an array, or of booleans, 1 and 0."""
  dtype, is_list = np.asarray(label).dtype.kind, isinstance(label, list | tuple)
  if dtype in "OSU" or (is_list and dtype in "iu") or not len(label):
    return [_class(each) for each in label]
  return _row(label)


def _row(label: Any) -> np.ndarray:
  row = np.array([_float(each) for each in label], np.float64)
  if not row.size:
    raise ValueError
  return row


def _float(value: Any) -> float:
  if isinstance(value, str | bytes):
    value = {"true": 1, "false": 0}.get(_text(value).lower(), value)
  return float(value)


def _separated(text: str) -> list[Any]:
  text = text.strip()
  if text.startswith("["):
    found = json.loads(text)
    return found if isinstance(found, list) else [found]
  if text in ("", "-"):
    return []
  return [part.strip() for part in text.split("|" if "|" in text else ",")]


def _text(label: str | bytes) -> str:
  """Text; TensorFlow has it as bytes."""
  if isinstance(label, bytes):
    return label.decode("utf-8", "backslashreplace")
  return label


def _is_number(text: str) -> bool:
  return re.fullmatch(r"[0-9]{1,9}", text) is not None

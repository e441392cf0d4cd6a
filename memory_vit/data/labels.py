"""Labels as people write them: numbers and names of classes, lists, values.

In a text, several are separated by "|", or else by ","; "-" is none. A text
that begins with "[" is JSON, in which names may have any character.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from memory_vit.errors import DataError
from memory_vit.runtime import messages

MOST_CLASSES = 2**20
# A class; several labels; or float32 (c,): values, or 1 and 0 for each label.
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
    elif np.ndim(label) == 0 and not isinstance(label, set):
      several = [np.asarray(label).item()]
    return _several(several) if kind == "labels" else _row(several)
  except (TypeError, ValueError, OverflowError, RecursionError):
    raise DataError(
      f"its label is {messages.brief(label)}, expected {_EXPECTED[kind]}"
    ) from None


def names_among(labels: Sequence[Label], kind: str) -> tuple[str, ...]:
  """The names among labels, sorted, or "0" up to the greatest number."""
  rows = [len(label) for label in labels if isinstance(label, np.ndarray)]
  if rows:
    return tuple(map(str, range(rows[0])))
  found = set(_flat(labels))
  if not found:
    raise DataError("no example has a label: expected the names of all labels")
  if names := {label for label in found if isinstance(label, str)}:
    return tuple(sorted(names))
  greatest = max(label for label in found if isinstance(label, int))
  return tuple(map(str, range(min(greatest + 1, MOST_CLASSES))))


def numbers_in_text(
  labels: Sequence[Label], names: Sequence[str] = ()
) -> list[Label]:
  """Numbers for texts that are, if all texts are, and none is a name."""
  texts = {label for label in _flat(labels) if isinstance(label, str)}
  if not texts.isdisjoint(names) or not all(map(_is_number, texts)):
    return list(labels)
  return [
    int(label)
    if isinstance(label, str)
    else [int(each) for each in label]
    if isinstance(label, list)
    else label
    for label in labels
  ]


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Makes numbers of the labels of a data set, whose names are known."""

  kind: str
  names: Sequence[str]

  @functools.cached_property
  def _places(self) -> dict[str, int]:
    return {name: i for i, name in enumerate(self.names)}

  def __call__(self, label: Label) -> int | np.ndarray:
    """The class, or float32 (c,); a `DataError` begins with "its label"."""
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
        f"its label is {messages.brief(label)}, which names one twice (1 and 0 "
        "for each label are an array, and no list)"
      )
    return row

  def _number(self, label: int | str) -> int:
    found = self._places.get(label, -1) if isinstance(label, str) else label
    if not 0 <= found < len(self.names):
      raise DataError(
        f"its label is {messages.brief(label)}, expected 0 to "
        f"{len(self.names) - 1:,}, or one of the {self.kind} "
        f"{messages.name_list(self.names)}"
      )
    return found


def _flat(labels: Iterable[Label]) -> Iterable[int | str]:
  for label in labels:
    if isinstance(label, list):
      yield from label
    elif isinstance(label, int | str):
      yield label


def _class(label: Any) -> int | str:
  array = np.asarray(label)
  value = array.item() if array.ndim == 0 else label
  value = _text(value) if isinstance(value, bytes) else value
  if not isinstance(value, int | str) or value == "":
    raise TypeError
  return value


def _several(label: Any) -> list[int | str] | np.ndarray:
  """Numbers or names; of an array, booleans and fractions 1 and 0 for each."""
  found = sorted(label) if isinstance(label, set) else label
  array = np.asarray(found)
  is_list = isinstance(found, list | tuple)
  if (
    array.dtype.kind in "bf"
    and array.size
    or not (is_list or array.dtype.kind in "OSU")
  ):
    return _row(found)
  return [_class(each) for each in found]


def _row(label: Any) -> np.ndarray:
  with np.errstate(over="ignore"):  # infinity is refused, as it is of a file
    row = np.array([_float(each) for each in label], np.float32)
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

"""Parse labels as people write them: class numbers and names, lists, values.

Several labels in a text are separated by "|", or else by ","; "-" means none. A
text that begins with "[" is JSON, so that names may contain separators. Any
other text is a single class or a single value. White space around a text is
ignored, and names are compared in Unicode's form NFC.
"""

import json
import re
import unicodedata
from typing import Any, TypeAlias

from etils import epy

from memory_vit.errors import DataError

with epy.lazy_imports():
  import numpy as np

# One class; a list of labels; an array (c,) of values; or an array (c,) that
# holds a 0 or 1 for each label.
Label: TypeAlias = "int | str | list[int | str] | np.ndarray"

# Pattern of the index of a class or label in the lines of a file list.
INDEX = rb"(0|[1-9][0-9]{0,8})"
# Pattern of a value as text: a decimal number, such as "-2.5e3".
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def name_of(text: str | bytes) -> str:
  """Return a name without white space around it, in Unicode's form NFC."""
  if isinstance(text, bytes):  # TensorFlow's strings are bytes
    text = text.decode("utf-8", "backslashreplace")
  text = text.strip().strip("\ufeff\u200b").strip()  # BOM, zero-width space
  return unicodedata.normalize("NFC", text)


def parts(label: Any, *, separators: bool = True) -> Any:
  """Split the label of an example into its labels or values.

  Without `separators`, a text is a single label or value unless it is JSON.
  """
  if not isinstance(label, str | bytes):
    return [np.asarray(label).item()] if np.ndim(label) == 0 else label
  text = name_of(label)
  if text.startswith("["):
    return json.loads(text)
  if not separators:
    return [text]
  if text in ("", "-"):
    return []
  return [part.strip() for part in text.split("|" if "|" in text else ",")]


def class_of(label: Any) -> int | str:
  """Return a class number or name; else raise TypeError or ValueError."""
  array = np.asarray(label)
  value = array.item() if array.ndim == 0 else label
  if isinstance(value, str | bytes):
    value = name_of(value)
  if isinstance(value, bool | float) and value == int(value):
    value = int(value)
  if not isinstance(value, int | str) or value == "":
    raise TypeError
  return value


def row(label: Any) -> "np.ndarray":
  """Return numbers as float64 (c,); else raise TypeError or ValueError."""
  numbers = np.array([_float(value) for value in label], np.float64)
  if not numbers.size:
    raise ValueError
  return numbers


def _float(value: Any) -> float:
  if isinstance(value, str | bytes):
    value = _decimal(name_of(value).replace("\N{MINUS SIGN}", "-"))
  return float(value)


def _decimal(text: str) -> str:
  """Return a number in Python's notation; raise if its comma is ambiguous."""
  if re.fullmatch(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+", text):
    raise DataError(
      f"its label is {text!r}, whose comma may separate thousands or decimals: "
      "expected numbers such as 1234.5"
    )
  if re.fullmatch(r"[+-]?[0-9]+,[0-9]+", text):
    text = text.replace(",", ".")
  text = {"true": "1", "false": "0"}.get(text.lower(), text)
  if not DECIMAL.fullmatch(text):
    raise ValueError
  return text

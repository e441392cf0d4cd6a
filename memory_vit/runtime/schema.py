"""Typed dataclasses from plain dictionaries, such as parsed JSON."""

import contextlib
import dataclasses
import operator
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from memory_vit.errors import MemoryVitError
from memory_vit.runtime.messages import brief, refusal, shortened

if TYPE_CHECKING:
  from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")


class _TypeMismatchError(Exception):
  """Raised for a value that has none of the allowed types."""


def build(cls: type, values: Any, where: str, error: type[Exception]) -> Any:
  """Build a dataclass of numbers, text, tuples and dataclasses from a dict."""
  fields = {field.name: field for field in dataclasses.fields(cls)}
  require_keys(values, tuple(fields), where, error)
  built: dict[str, Any] = {}
  for name, field in fields.items():
    inner = f"{where}.{name}"
    if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
      built[name] = build(field.type, values[name], inner, error)
    else:
      built[name] = typed(field.type, values[name], inner, error)
  try:
    return cls(**built)
  except MemoryVitError as refused:
    text = shortened(str(refused))
    text = text if text.startswith(where) else f"{where}: {text}"
    raise error(text) from refused


def require_keys(
  values: Any, keys: tuple[str, ...], where: str, error: type[Exception]
) -> None:
  """Raise `error` unless `values` is a mapping with exactly these keys."""
  if not isinstance(values, Mapping):
    raise error(refusal(where, values, f"an object with {list(keys)}"))
  missing = [key for key in keys if key not in values]
  unknown = [key for key in values if key not in keys]
  if missing or unknown:
    raise error(
      f"{where}: missing keys {missing}, unknown keys {brief(unknown)}, "
      f"expected exactly the keys {list(keys)}."
    )


def fits(kind: Any, value: Any) -> bool:
  """Return whether a field of type `kind` may have this value."""
  with contextlib.suppress(_TypeMismatchError):
    typed(kind, value, "", _TypeMismatchError)
    return True
  return False


def typed(kind: Any, value: Any, where: str, error: type[Exception]) -> Any:
  """Return a value as type `kind`, with lists as tuples, or raise `error`."""
  if typing.get_origin(kind) is tuple:
    if isinstance(value, list | tuple):
      inner, _ = typing.get_args(kind)
      return tuple(
        typed(inner, v, f"{where}[{i}]", error) for i, v in enumerate(value)
      )
  elif isinstance(kind, types.UnionType):
    for inner in typing.get_args(kind):
      with contextlib.suppress(_TypeMismatchError):
        return typed(inner, value, where, _TypeMismatchError)
  elif typing.get_origin(kind) is dict:
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
      return dict(value)
  elif type(value) is kind:
    return value
  elif kind is float and type(value) is int:
    with contextlib.suppress(OverflowError):
      return float(value)
  raise error(refusal(where, value, f"a value of type {type_name(kind)}"))


def whole_number(
  name: str, value: Any, least: int, error: type[MemoryVitError]
) -> int:
  """Return an integer of Python or NumPy as `int`; raise `error` if invalid."""
  if isinstance(value, bool) or not hasattr(value, "__index__"):
    raise error(refusal(name, value, f"an integer of at least {least}"))
  number = operator.index(value)
  if number < least:
    raise error(refusal(name, number, f"at least {least}"))
  return number


def type_name(kind: Any) -> str:
  if isinstance(kind, type):
    return kind.__name__
  return str(kind).replace("typing.", "")


def differences(found: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Return a line for each key in which two dictionaries differ."""
  return [
    f"{name}: {found.get(name)!r}, now {now.get(name)!r}"
    for name in sorted(now.keys() | found.keys())
    if now.get(name) != found.get(name)
  ]

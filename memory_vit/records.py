"""Plain dictionaries, as JSON and ConfigDict hold them.

They become typed dataclasses, or lie in files.
"""

import contextlib
import dataclasses
import json
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.escaping import escaped

with epy.lazy_imports():
  import jax  # The options are checked without it.

# Characters of a value in a message, and of several.
_MOST_SHOWN = 200
_MOST_LISTED = 1_000


class _TypeMismatchError(Exception):
  """A value has not one of the types that it may have."""


def build(cls: type, values: Any, where: str, error: type[Exception]) -> Any:
  """Makes a dataclass of a dictionary that has exactly its fields.

  Args:
    cls: a dataclass of numbers, strings, bools, tuples of such or of
      dictionaries, and further such dataclasses.
    values: what to make it of.
    where: what to call it in a message, such as "config".
    error: what to raise.

  Returns:
    An instance of `cls`.

  Raises:
    error: for a missing or an unknown key, a value of another type, or values
      that `cls` refuses.
  """
  fields = {field.name: field for field in dataclasses.fields(cls)}
  require_keys(values, tuple(fields), where, error)
  built = {}
  for name, field in fields.items():
    inner = f"{where}.{name}"
    if dataclasses.is_dataclass(field.type):
      built[name] = build(field.type, values[name], inner, error)
    else:
      built[name] = _typed(field.type, values[name], inner, error)
  try:
    return cls(**built)
  except MemoryVitError as refusal:
    text = shortened(str(refusal))
    text = text if text.startswith(where) else f"{where}: {text}"
    raise error(text) from refusal


def require_keys(
  values: Any, keys: tuple[str, ...], where: str, error: type[Exception]
) -> None:
  """Raises `error` unless `values` is a mapping with exactly these keys."""
  if not isinstance(values, Mapping):
    raise error(
      f"{where} is {brief(values)}, expected an object with {list(keys)}."
    )
  missing = [key for key in keys if key not in values]
  unknown = [key for key in values if key not in keys]
  if missing or unknown:
    raise error(
      f"{where}: missing keys {missing}, unknown keys {brief(unknown)}; it has "
      f"the keys {list(keys)}."
    )


def _typed(kind: Any, value: Any, where: str, error: type[Exception]) -> Any:
  """Checks a leaf; JSON and ConfigDict have lists where we have tuples."""
  if typing.get_origin(kind) is tuple:
    if isinstance(value, list | tuple):
      inner, _ = typing.get_args(kind)
      return tuple(
        _typed(inner, v, f"{where}[{i}]", error) for i, v in enumerate(value)
      )
  elif isinstance(kind, types.UnionType):
    for inner in typing.get_args(kind):
      with contextlib.suppress(_TypeMismatchError):
        return _typed(inner, value, where, _TypeMismatchError)
  elif typing.get_origin(kind) is dict:
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
      return dict(value)
  elif type(value) is kind:
    return value
  elif kind is float and type(value) is int:
    with contextlib.suppress(OverflowError):
      return float(value)
  name = str(kind) if typing.get_args(kind) else kind.__name__
  raise error(f"{where} is {brief(value)}, expected a value of type {name}.")


def shortened(text: str, most: int = _MOST_LISTED) -> str:
  """A text of at most so many characters; what is cut off leaves "..."."""
  return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(
  lines: Sequence[str], separator: str = "; ", most: int = _MOST_LISTED
) -> str:
  """As many lines as there is room for in a message, and how many are left.

  Args:
    lines: what is wrong.
    separator: between them.
    most: characters of all.
  """
  shown, room = [], most
  for line in lines:
    room -= len(line) + len(separator)
    if shown and room < 0:
      shown.append(f"and {len(lines) - len(shown)} more")
      break
    shown.append(shortened(line, most))
  return separator.join(shown)


def first_line(error: Exception) -> str:
  """What a library says is wrong, in one line of a message of ours."""
  line = next(iter(str(error).splitlines()), "") or type(error).__name__
  return shortened(escaped(line), _MOST_SHOWN)


def brief(value: Any) -> str:
  """What a message shows of a value that somebody else wrote."""
  if isinstance(value, str | bytes):
    value = value[: _MOST_SHOWN + 1]
  try:
    text = repr(value)
  # Python writes no number of more than 4,300 digits.
  except (ValueError, RecursionError) as error:
    text = f"a {type(value).__name__} that cannot be shown ({error})"
  return shortened(text, _MOST_SHOWN)


def read_json(path: Path) -> Any:
  """Reads a file that `write_json` wrote.

  Raises:
    ConfigError: where it is not readable.
  """
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{path} is not readable ({error}). Give another --workdir, or put back "
      "what was there."
    ) from error


def read_object(path: Path, *keys: str) -> Mapping[str, Any]:
  """`read_json`, of an object that has at least these keys.

  Raises:
    ConfigError: where it is not readable, or something else.
  """
  values = read_json(path)
  if not isinstance(values, Mapping) or not values.keys() >= {*keys}:
    raise ConfigError(
      f"{path} holds {brief(values)}, expected an object with {list(keys)}. "
      "Give another --workdir, or put back what was there."
    )
  return values


@contextlib.contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
  """Says which file could not be written, as on a full disk.

  Args:
    path: of the file.
    *errors: what its writer raises then, beside an `OSError`.

  Raises:
    TrainingError: in place of what the operating system, or orbax, raises.
  """
  try:
    yield
  except MemoryVitError:
    raise
  except (OSError, *errors) as error:
    raise TrainingError(
      f"{path} cannot be written: {shortened(str(error))}\n"
      "What was saved before is as it was. Make room, and give the same "
      "command again."
    ) from error


def write_json(path: Path, values: Any) -> None:
  """Writes a file that is whole or not there, by one process.

  Raises:
    TrainingError: where it cannot be written.
  """
  write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
  """As `write_json`."""
  if jax.process_index() != 0:
    return
  scratch = path.with_name(path.name + ".tmp")
  with writing(path):
    try:
      with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
      os.replace(scratch, path)
    finally:
      scratch.unlink(missing_ok=True)


def differences(found: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Where two dictionaries differ, one line for every key."""
  return [
    f"{name}: {found.get(name)!r}, now {now.get(name)!r}"
    for name in sorted(now.keys() | found.keys())
    if now.get(name) != found.get(name)
  ]

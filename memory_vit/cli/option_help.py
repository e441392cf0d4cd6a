"""The options of a configuration, as --help shows them.

What an option means is the comment above it in `config.py`, and what it may be
is its rule in `limits.py`: neither is written down a second time.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from memory_vit import config, limits

# Columns of --help.
_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Option:
  """One option.

  Attributes:
    key: "data.train".
    kind: its type, "int".
    default: its value where nothing is said.
    meaning: the comment above it.
    expected: what it may be.
  """

  key: str
  kind: str
  default: Any
  meaning: str
  expected: str


@functools.cache
def options() -> Mapping[str, Option]:
  """{key: option}, in the order of `config.Config`."""
  found = {}
  _collect(config.Config(), "", _comments(), found)
  return found


def sections() -> tuple[str, ...]:
  """What holds options: "data", "pretrain.data", ..."""
  parents = {key.rpartition(".")[0] for key in options()}
  return tuple(sorted(parents - {""}))


def nearest(key: str, count: int = 3) -> list[str]:
  """The options whose names are most like one that does not exist."""

  def likeness(known: str) -> float:
    whole = difflib.SequenceMatcher(None, key, known).ratio()
    ends = key.rpartition(".")[2], known.rpartition(".")[2]
    return max(whole, difflib.SequenceMatcher(None, *ends).ratio())

  return sorted(options(), key=likeness, reverse=True)[:count]


def text() -> str:
  """All options: default, meaning, what is allowed."""
  lines = []
  for option in options().values():
    lines.append(f"  --config.{option.key}={option.default!r}")
    for paragraph in (option.meaning, f"{option.kind}: {option.expected}."):
      lines += textwrap.wrap(
        paragraph, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
      )
  return "\n".join(lines)


def _collect(
  values: Any,
  prefix: str,
  comments: Mapping[tuple[str, str], str],
  found: dict[str, Option],
) -> None:
  """Adds the options of a dataclass, and of those in it."""
  for field in dataclasses.fields(values):
    key, value = f"{prefix}{field.name}", getattr(values, field.name)
    if dataclasses.is_dataclass(value):
      _collect(value, f"{key}.", comments, found)
      continue
    classes = [base.__name__ for base in type(values).__mro__]
    meanings = [comments.get((name, field.name)) for name in classes]
    kind = getattr(field.type, "__name__", "")
    if "[" in str(field.type):
      kind = str(field.type)
    found[key] = Option(
      key=key,
      kind=kind.replace("typing.", ""),
      default=value,
      meaning=next(filter(None, meanings), ""),
      expected=limits.RULES[key].expected,
    )


def _comments() -> dict[tuple[str, str], str]:
  """{(class, field): the comment above it} of `config.py`."""
  source = inspect.getsource(config)
  lines, found = source.splitlines(), {}
  for part in ast.parse(source).body:
    if not isinstance(part, ast.ClassDef):
      continue
    for field in part.body:
      if isinstance(field, ast.AnnAssign):
        first = field.lineno - 1  # from 0
        above = first
        while lines[above - 1].strip().startswith("#"):
          above -= 1
        comment = [line.strip().lstrip("# ") for line in lines[above:first]]
        found[part.name, field.target.id] = " ".join(comment)
  return found

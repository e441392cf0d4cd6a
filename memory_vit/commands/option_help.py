"""Options of a configuration, as --help shows them.

Meanings are read from comments in `config.py`, limits from its rules.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path

from memory_vit import config
from memory_vit.config import OPTIONS


@functools.cache
def meanings() -> Mapping[str, str]:
  """Return {key: comment above the option}, in the order of `config.Config`."""
  comments = _comments()
  return {
    key: comments[option.owner.__name__, key.rpartition(".")[2]]
    for key, option in OPTIONS.items()
  }


def docstring(file: str | Path) -> str:
  """Read a module's docstring from its file: `python -OO` removes `__doc__`."""
  return ast.get_docstring(ast.parse(Path(file).read_text("utf-8"))) or ""


def sections() -> tuple[str, ...]:
  """Return the sections of a configuration: "data", "task", ..."""
  parents = {key.rpartition(".")[0] for key in OPTIONS}
  return tuple(sorted(parents - {""}))


def text() -> str:
  """Return the help of all options: default, meaning and allowed values."""
  lines = []
  for key, option in OPTIONS.items():
    lines.append(f"  --config.{key}={option.default!r}")
    lines += indented(meanings()[key]) + indented(f"{option.expected}.")
  return "\n".join(lines)


def indented(text: str) -> list[str]:
  indent = " " * 6
  return textwrap.wrap(
    text, 80, initial_indent=indent, subsequent_indent=indent,
    break_on_hyphens=False,
  )  # fmt: skip


def _comments() -> dict[tuple[str, str], str]:
  """Return {(class, field): comment above the field} of `config.py`."""
  source = inspect.getsource(config)
  lines, comments = source.splitlines(), {}
  for part in ast.parse(source).body:
    if not isinstance(part, ast.ClassDef):
      continue
    for field in part.body:
      if isinstance(field, ast.AnnAssign) and isinstance(
        field.target, ast.Name
      ):
        first = field.lineno - 1  # index of the field in `lines`
        above = first
        while lines[above - 1].strip().startswith("#"):
          above -= 1
        comment = [line.strip().lstrip("# ") for line in lines[above:first]]
        comments[part.name, field.target.id] = " ".join(comment)
  return comments

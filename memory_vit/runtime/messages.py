"""Text for messages: untrusted names are escaped, long values shortened.

Names of classes and files, and texts of tasks, may contain line breaks,
terminal control sequences, marks that change the writing direction, and bytes
that are not UTF-8. Letters of all languages stay as they are.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

# Extras of pyproject.toml that an error may tell the user to install.
Extra = Literal["gcs", "hf", "onnx", "ray", "serve", "train", "wandb"]

# Unicode categories: control characters, invisible formatting, surrogates (of
# bytes that are not UTF-8), line separators and paragraph separators.
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Zero-width (non-)joiners are not escaped: Persian, Hindi and emoji need them.
_JOINERS = "\u200c\u200d"


def escaped(text: str) -> str:
  r"""Escape characters that cannot be printed: a line break becomes "\n"."""
  if text.isprintable():  # the usual case, checked quickly
    return text
  return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
  if character in _JOINERS or unicodedata.category(character) not in _ESCAPED:
    return character
  return _code(character)


def _code(character: str) -> str:
  number = ord(character)
  if 0xDC80 <= number <= 0xDCFF:  # surrogate for a byte that is not UTF-8
    return f"\\x{number - 0xDC00:02x}"
  return ascii(character)[1:-1]


def utf8(text: str) -> str:
  r"""Escape text that UTF-8 cannot encode: an invalid byte becomes "\xff"."""
  return re.sub("[\ud800-\udfff]", lambda match: _code(match[0]), text)


def counted(count: int, noun: str) -> str:
  """Return a count and its noun: "1 image", "2,000 images", "2 passes"."""
  ending = "es" if noun.endswith("s") else "s"
  return f"{count:,} {noun}{'' if count == 1 else ending}"


# Maximum numbers of characters that messages show of a value and of a list.
_MOST_SHOWN = 200
_MOST_LISTED = 1_000


def shortened(text: str, most: int = _MOST_LISTED) -> str:
  return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(
  lines: Sequence[str], separator: str = "; ", most: int = _MOST_LISTED
) -> str:
  """Join lines up to about `most` characters; end with "and 3 more" if cut."""
  shown: list[str] = []
  room = most
  for line in lines:
    room -= len(line) + len(separator)
    if shown and room < 0:
      shown.append(f"and {len(lines) - len(shown)} more")
      break
    shown.append(shortened(line, most))
  return separator.join(shown)


def one_line(text: str, most: int = 2_000) -> str:
  """Return text on one line, escaped and shortened."""
  return shortened(escaped(" ".join(text.split())), most)


def first_line(error: BaseException | str) -> str:
  """Return the first line of a library's error, escaped and shortened."""
  line = next(iter(str(error).splitlines()), "") or type(error).__name__
  return shortened(escaped(line), _MOST_SHOWN)


def named(error: BaseException) -> str:
  """Return the type and message of an error: "OSError: no such file"."""
  return f"{type(error).__name__}: {first_line(error)}"


def brief(value: Any) -> str:
  """Return a short `repr` of an untrusted value."""
  if isinstance(value, str | bytes):
    value = value[: _MOST_SHOWN + 1]
  try:
    text = repr(value)
  # `repr` fails for integers of more than 4,300 digits and for deep nesting.
  except (ValueError, RecursionError) as error:
    text = f"a {type(value).__name__} that cannot be shown ({error})"
  return shortened(text, _MOST_SHOWN)


def number(value: float) -> str:
  """Format a number: four significant digits, one decimal from 10,000 on."""
  return f"{value:.1f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def refusal(name: str, value: Any, expected: str) -> str:
  return f"{name} is {brief(value)}, expected {expected}."


def not_installed(what: str, library: str | None, extra: Extra) -> str:
  """Return a message that `what` needs a library, and how to install it."""
  how = installation(extra)
  return f"{what} needs {library}, which is not installed: {how}"


def installation(extra: Extra) -> str:
  """Return how to install an extra."""
  # Do not name the package: on PyPI, the name could belong to anybody.
  return f"in the checkout, pip install '.[{extra}]'"


def name_list(names: Sequence[str], most: int = 8) -> str:
  """Join up to `most` names, with "and 3 more" for the rest."""
  shown = ", ".join(names[:most])
  left = len(names) - most
  return f"{shown} and {left} more" if left > 0 else shown

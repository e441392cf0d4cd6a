"""Text for messages: foreign names escaped, long values shortened.

Names of classes and files, and texts of tasks, may hold line breaks, commands
to a terminal, marks that turn the direction of writing, and bytes that are no
text. Letters of all languages stay as they are.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

# The extras of pyproject.toml that errors name.
Extra = Literal["gcs", "hf", "onnx", "ray", "serve", "train", "wandb"]

# Controls, formats (direction, invisible), surrogates of bytes that are no
# UTF-8, ends of lines and paragraphs.
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
# These join letters, in Persian and Hindi, and emoji.
_JOINERS = "\u200c\u200d"


def escaped(text: str) -> str:
  r"""Text on one line: a line break is "\\n"."""
  if text.isprintable():  # nearly always, and quick
    return text
  return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
  if character in _JOINERS or unicodedata.category(character) not in _ESCAPED:
    return character
  return _code(character)


def _code(character: str) -> str:
  number = ord(character)
  if 0xDC80 <= number <= 0xDCFF:  # Python's form of a byte that is no UTF-8
    return f"\\x{number - 0xDC00:02x}"
  return ascii(character)[1:-1]


def utf8(text: str) -> str:
  r"""Text that UTF-8 can hold: other bytes of a file's name become "\\xff"."""
  return re.sub("[\ud800-\udfff]", lambda found: _code(found[0]), text)


def counted(count: int, noun: str) -> str:
  """ "1 image", "2,000 images", "2 passes"."""
  ending = "es" if noun.endswith("s") else "s"
  return f"{count:,} {noun}{'' if count == 1 else ending}"


# Characters of one value in a message, and of several.
_MOST_SHOWN = 200
_MOST_LISTED = 1_000


def shortened(text: str, most: int = _MOST_LISTED) -> str:
  return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(
  lines: Sequence[str], separator: str = "; ", most: int = _MOST_LISTED
) -> str:
  """The first lines, up to about `most` characters, and "and 3 more"."""
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
  """Text on one line, escaped."""
  return shortened(escaped(" ".join(text.split())), most)


def first_line(error: BaseException | str) -> str:
  """The first line of a library's error, escaped and shortened."""
  line = next(iter(str(error).splitlines()), "") or type(error).__name__
  return shortened(escaped(line), _MOST_SHOWN)


def named(error: BaseException) -> str:
  """ "OSError: no such file"."""
  return f"{type(error).__name__}: {first_line(error)}"


def brief(value: Any) -> str:
  """A short `repr` of a value that somebody else wrote."""
  if isinstance(value, str | bytes):
    value = value[: _MOST_SHOWN + 1]
  try:
    text = repr(value)
  # Python writes no number of more than 4,300 digits.
  except (ValueError, RecursionError) as error:
    text = f"a {type(value).__name__} that cannot be shown ({error})"
  return shortened(text, _MOST_SHOWN)


def number(value: float) -> str:
  """Four digits, or all before the point: a time in seconds has ten."""
  return f"{value:.1f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def refusal(name: str, value: Any, expected: str) -> str:
  return f"{name} is {brief(value)}, expected {expected}."


def not_installed(what: str, library: str | None, extra: Extra) -> str:
  """What needs a library that is missing, and how to install it."""
  how = installation(extra)
  return f"{what} needs {library}, which is not installed: {how}"


def installation(extra: Extra) -> str:
  """How to install an extra. The name alone could be anybody's on an index."""
  return f"in the checkout, pip install '.[{extra}]'"


def name_list(names: Sequence[str], most: int = 8) -> str:
  """The first names, and "and 3 more"."""
  shown = ", ".join(names[:most])
  left = len(names) - most
  return f"{shown} and {left} more" if left > 0 else shown

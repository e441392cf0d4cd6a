"""Names that strangers chose, escaped so that they stay inside a line of ours.

Class names, file names and what tasks say of themselves may hold line breaks,
commands to a terminal, marks that turn the direction of writing, and bytes that
are no text. Letters of all languages stay as they are.
"""

import unicodedata

# Controls, formats (of direction, invisible), bytes that are no UTF-8, and what
# ends a line or a paragraph.
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
# These join letters, in Persian and Hindi, and emoji.
_JOINERS = "\u200c\u200d"


def escaped(text: str) -> str:
  r"""Text of one line, such as "a\\nb" for a name with a line break."""
  if text.isprintable():  # nearly always, and quick
    return text
  return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
  if character in _JOINERS:
    return character
  if unicodedata.category(character) not in _ESCAPED:
    return character
  return ascii(character)[1:-1]

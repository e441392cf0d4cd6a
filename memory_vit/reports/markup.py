"""HTML in which text is text: whatever is not marked as HTML is escaped."""

from __future__ import annotations

import html

from memory_vit.runtime.messages import escaped

# These have no content, and no end.
_VOID = frozenset({"img", "meta"})


class Html(str):
  """Text that is HTML, and is not escaped again."""

  __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
  """An element of HTML.

  Args:
    tag: its name.
    children: HTML, or text, which is escaped.
    attributes: their names, with _ for - and at the end of a word of Python.
  """
  named = "".join(
    f' {name.rstrip("_").replace("_", "-")}="{_text(value)}"'
    for name, value in attributes.items()
  )
  if tag in _VOID:
    return Html(f"<{tag}{named}>")
  return Html(f"<{tag}{named}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Html:
  """HTML and text, which is escaped, one after the other."""
  return Html("".join(map(_text, children)))


def _text(value: str) -> str:
  # Line breaks and what turns the direction of writing are shown.
  return value if isinstance(value, Html) else html.escape(escaped(value))

"""HTML elements: text that is not marked as `Html` is escaped."""

from __future__ import annotations

import html

from memory_vit.runtime.messages import escaped

# Elements without content and end tag.
_VOID = frozenset({"img", "meta"})


class Html(str):
  """HTML, which is not escaped again."""

  __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
  """An element; in names of attributes _ stands for -, a last _ is dropped."""
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
  # `escaped` shows line breaks and marks of the direction of writing.
  return value if isinstance(value, Html) else html.escape(escaped(value))

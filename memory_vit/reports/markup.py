"""HTML elements: text that is not marked as `Html` is escaped."""

from __future__ import annotations

import html

from memory_vit.runtime.messages import escaped

# Elements that have neither content nor an end tag.
_VOID = frozenset({"img", "meta"})


class Html(str):
  """HTML that is inserted as it is, whereas other strings are escaped."""

  __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
  """Return an element; `class_` sets class and `aria_label` sets aria-label."""
  pairs = "".join(
    f' {name.rstrip("_").replace("_", "-")}="{_text(value)}"'
    for name, value in attributes.items()
  )
  if tag in _VOID:
    return Html(f"<{tag}{pairs}>")
  return Html(f"<{tag}{pairs}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Html:
  """Join pieces of HTML and text; text is escaped."""
  return Html("".join(map(_text, children)))


def _text(value: str) -> str:
  # `escaped` makes line breaks and bidirectional controls visible.
  return value if isinstance(value, Html) else html.escape(escaped(value))

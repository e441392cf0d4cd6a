"""HTML pages that load nothing and run nothing, and their parts."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import io
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from PIL import Image

from memory_vit.reports.markup import Html, element
from memory_vit.runtime import messages

MISSING = "–"
# Rows of the tables on a page; the CSV files have all.
MOST_ROWS = 200
# A name, its value for people, and an interval or "".
Number = tuple[str, str, str]


def document(title: str, head: Html, *body: Html) -> str:
  """A whole page; its content security policy allows only its own style."""
  style = _style()
  digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
  policy = (
    f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
  )
  width = "width=device-width, initial-scale=1"
  page = element(
    "html",
    element(
      "head",
      element("meta", charset="utf-8"),
      element("meta", http_equiv="Content-Security-Policy", content=policy),
      element("meta", name="viewport", content=width),
      element("meta", name="referrer", content="no-referrer"),
      element("title", title),
      element("style", Html(style)),
    ),
    element("body", element("header", element("h1", title), head), *body),
    lang="en",
  )
  return f"<!doctype html>\n{page}\n"


def table(
  header: Sequence[str],
  rows: Iterable[Sequence[str]],
  *,
  names: Collection[int],
  label: str,
) -> Html:
  """A table that scrolls by itself; `names` are columns of text."""

  def row(tag: str, cells: Sequence[str]) -> Html:
    return element(
      "tr",
      *(
        element(tag, cell, class_="name") if i in names else element(tag, cell)
        for i, cell in enumerate(cells)
      ),
    )

  content = element(
    "table",
    element("thead", row("th", header)),
    element("tbody", *(row("td", cells) for cells in rows)),
  )
  # The tabindex makes it scroll by keyboard.
  return element(
    "div",
    content,
    class_="scroll",
    tabindex="0",
    role="region",
    aria_label=label,
  )


def cut_table(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  *,
  total: int,
  file: str,
  order: str,
  names: Collection[int],
  label: str,
) -> list[Html]:
  """A table of the first of `total` rows, below a line that says so."""
  left = total - len(rows)
  more = f"{left:,} more are in {file}." if left else ""
  note = f"{order} {more}".strip()
  found = table(header, rows, names=names, label=label)
  return [element("p", note, class_="quiet"), found] if note else [found]


def reliability(question: str, error: float | None, png: bytes) -> list[Html]:
  """A reliability diagram, below the question that it answers."""
  text = (
    f"{question} Bars below the diagonal: the model is too sure. The expected "
    f"calibration error is {percent(error)}."
  )
  return [element("p", text), plot(png, "Reliability diagram")]


def plot(png: bytes, described: str) -> Html:
  """A figure from a PNG file, with its text for those who cannot see it."""
  encoded = base64.b64encode(png).decode()
  image = element("img", src=f"data:image/png;base64,{encoded}", alt=described)
  return element("figure", image, class_="plot")


def data_uri(image: np.ndarray, kind: str) -> str:
  """An image, uint8 (side, side, 3), as a data URL."""
  file = io.BytesIO()
  Image.fromarray(image).save(file, kind)
  encoded = base64.b64encode(file.getvalue()).decode()
  return f"data:image/{kind.lower()};base64,{encoded}"


def percent(share: float | None, digits: int = 2) -> str:
  """A share for people; unknown ones are a dash."""
  if share is None or np.isnan(share):
    return MISSING
  # A no-break space.
  return f"{100 * share:.{digits}f}\u00a0%"


def number(value: float | None, unit: str = "") -> str:
  """A number for people; unknown ones are a dash."""
  if value is None or np.isnan(value):
    return MISSING
  return f"{messages.number(value)} {unit}".rstrip()


@functools.cache
def _style() -> str:
  folder = importlib.resources.files("memory_vit.reports")
  return (folder / "report.css").read_text(encoding="utf-8")

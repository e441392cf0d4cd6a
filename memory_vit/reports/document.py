"""HTML pages without scripts and external resources, and their parts."""

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
# Maximum number of rows of a table on a page; the CSV files have all rows.
MOST_ROWS = 200
# Title, value and confidence interval (or "") of a number, as texts.
Number = tuple[str, str, str]


def document(title: str, head: Html, *body: Html) -> str:
  """Return a page whose security policy forbids scripts and external files."""
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
  """Return a scrollable table; `names` are the indices of text columns."""

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
  # The tabindex lets readers scroll the table by keyboard.
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
  """Return a table below a note on the order of rows and on rows left out."""
  left = total - len(rows)
  more = f"{left:,} more are in {file}." if left else ""
  note = f"{order} {more}".strip()
  shown = table(header, rows, names=names, label=label)
  return [element("p", note, class_="quiet"), shown] if note else [shown]


def reliability(question: str, error: float | None, png: bytes) -> list[Html]:
  """Return a reliability diagram below the question that it answers."""
  text = (
    f"{question} Bars below the diagonal show that the model is overconfident. "
    f"The expected calibration error is {percent(error)}."
  )
  return [element("p", text), plot(png, "Reliability diagram")]


def plot(png: bytes, described: str) -> Html:
  """Return a PNG file as a figure whose alternative text is `described`."""
  encoded = base64.b64encode(png).decode()
  image = element("img", src=f"data:image/png;base64,{encoded}", alt=described)
  return element("figure", image, class_="plot")


def data_uri(image: np.ndarray, kind: str) -> str:
  """Return an image, uint8 (side, side, 3), as a data URL of a PNG or JPEG."""
  file = io.BytesIO()
  Image.fromarray(image).save(file, kind)
  encoded = base64.b64encode(file.getvalue()).decode()
  return f"data:image/{kind.lower()};base64,{encoded}"


def percent(share: float | None, digits: int = 2) -> str:
  """Return a share as a percentage; a dash if it is None or NaN."""
  if share is None or np.isnan(share):
    return MISSING
  # The no-break space keeps the number and the percent sign on one line.
  return f"{100 * share:.{digits}f}\u00a0%"


def number(value: float | None, unit: str = "") -> str:
  """Return a number with its unit as text; a dash if it is None or NaN."""
  if value is None or np.isnan(value):
    return MISSING
  return f"{messages.number(value)} {unit}".rstrip()


@functools.cache
def _style() -> str:
  folder = importlib.resources.files("memory_vit.reports")
  return (folder / "report.css").read_text(encoding="utf-8")

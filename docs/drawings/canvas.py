"""Boxes, arrows and words as SVG, in colours for light and for dark pages.

A file follows `prefers-color-scheme` and brings its own ground, so it can be
read whatever is around it. Widths are some 640 units with words of 14 or more:
on a telephone of 360 points they have 8.
"""

import dataclasses
from collections.abc import Sequence
from xml.sax.saxutils import escape

# Class: (light fill, light stroke, dark fill, dark stroke). Orange is learned,
# blue is frozen, grey is what is given; they differ in lightness as well.
KINDS = {
  "learned": ("#fbd38d", "#b7501c", "#6b3f12", "#f0a860"),
  "frozen": ("#cfe3f5", "#2b6cb0", "#1d3d5c", "#6cace4"),
  "given": ("#e4e7eb", "#6b7785", "#363f49", "#98a4b0"),
  "open": ("#ffffff", "#9aa5b1", "#1b2027", "#6b7785"),
}
# Class: (light, dark), for words and lines.
INKS = {
  "ink": ("#1f2933", "#e4e7eb"),
  "muted": ("#52606d", "#b0bcc8"),
  "orange": ("#b7501c", "#f0a860"),
  "blue": ("#2b6cb0", "#6cace4"),
}
GROUND = ("#ffffff", "#1b2027")
_FONT = "Helvetica, Arial, sans-serif"


@dataclasses.dataclass
class Canvas:
  """A drawing under way.

  Attributes:
    width: of the drawing, in its own units.
    height: the same.
    title: what is drawn, for those who cannot see it.
    parts: elements of SVG so far.
  """

  width: int
  height: int
  title: str
  parts: list[str] = dataclasses.field(default_factory=list)

  def box(
    self,
    corner: tuple[float, float],
    size: tuple[float, float],
    lines: str | Sequence[str] = (),
    kind: str = "frozen",
    *,
    dashed: bool = False,
  ) -> None:
    """Draw a box with centred words.

    Args:
      corner: upper left, (x, y).
      size: (width, height).
      lines: of text; the second and later ones are muted.
      kind: one of `KINDS`.
      dashed: its border.
    """
    (x, y), (w, h) = corner, size
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    self.parts.append(
      f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" '
      f'class="{kind}"{dash}/>'
    )
    lines = [lines] if isinstance(lines, str) else list(lines)
    top = y + h / 2 - 9 * (len(lines) - 1)
    for i, line in enumerate(lines):
      ink = "muted" if i else "ink"
      self.text((x + w / 2, top + 18 * i + 5), line, ink)

  def text(
    self,
    at: tuple[float, float],
    words: str,
    ink: str = "ink",
    *,
    anchor: str = "middle",
    size: int = 15,
    bold: bool = False,
  ) -> None:
    """Write words on a line; `at` is on its base line."""
    weight = ' font-weight="bold"' if bold else ""
    self.parts.append(
      f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}" '
      f'font-size="{size}" class="{ink}"{weight}>{escape(words)}</text>'
    )

  def arrow(
    self,
    *points: tuple[float, float],
    ink: str = "muted",
    dashed: bool = False,
    width: float = 2,
  ) -> None:
    """Draw a line through points, with a head at the last."""
    path = " L".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    self.parts.append(
      f'<path d="M{path}" fill="none" stroke-width="{width:g}" '
      f'class="line-{ink}" marker-end="url(#head-{ink})"{dash}/>'
    )

  def legend(self, at: tuple[float, float], entries: dict[str, str]) -> None:
    """Explain kinds of boxes, side by side: {kind: words}."""
    x, y = at
    for kind, words in entries.items():
      self.parts.append(
        f'<rect x="{x:g}" y="{y - 12:g}" width="14" height="14" '
        f'class="{kind}"/>'
      )
      self.text((x + 20, y), words, "muted", anchor="start", size=14)
      x += 40 + 7.2 * len(words)

  def svg(self) -> str:
    """The file."""
    body = "\n  ".join(self.parts)
    return (
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} '
      f'{self.height}" role="img" aria-label="{escape(self.title)}" '
      f'font-family="{_FONT}">\n  <title>{escape(self.title)}</title>\n  '
      f"<style>{_style()}</style>\n  <defs>{_heads()}</defs>\n  "
      f'<rect width="{self.width}" height="{self.height}" rx="10" '
      f'class="ground"/>\n  {body}\n</svg>\n'
    )


def _style() -> str:
  light, dark = (
    [f".ground{{fill:{GROUND[0]}}}"],
    [f".ground{{fill:{GROUND[1]}}}"],
  )
  for kind, colours in KINDS.items():
    light.append(f".{kind}{{fill:{colours[0]};stroke:{colours[1]}}}")
    dark.append(f".{kind}{{fill:{colours[2]};stroke:{colours[3]}}}")
  for ink, colours in INKS.items():
    for rules, colour in zip((light, dark), colours, strict=True):
      rules.append(
        f".{ink},.head-{ink}{{fill:{colour}}}.line-{ink}{{stroke:{colour}}}"
      )
  return f"{''.join(light)}@media(prefers-color-scheme:dark){{{''.join(dark)}}}"


def _heads() -> str:
  return "".join(
    f'<marker id="head-{ink}" viewBox="0 0 8 8" refX="7" refY="4" '
    f'markerWidth="12" markerHeight="12" markerUnits="userSpaceOnUse" '
    f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" '
    f'class="head-{ink}"/></marker>'
    for ink in INKS
  )

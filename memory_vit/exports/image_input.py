"""The input of an exported function: floats in [-1, 1], or uint8 pixels.

For pixels, the function includes the resizing and scaling of evaluation.
"""

from __future__ import annotations

import dataclasses
import re

from memory_vit.errors import ExportError
from memory_vit.runtime.messages import brief

KINDS = ("float32", "uint8")
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInput:
  """The images that an exported function takes.

  Attributes:
    kind: "float32": (b, side, side, 3) in [-1, 1]; "uint8": pixels
      (b, height, width, 3) of 0 to 255.
    size: fixed (height, width) of uint8 images; None for any size.
  """

  kind: str = "float32"
  size: tuple[int, int] | None = None

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ExportError(
        f"input is {brief(self.kind)}, expected one of {', '.join(KINDS)}."
      )
    if self.size and self.kind != "uint8":
      raise ExportError(
        "input_size is only for uint8 images: floats have the image size of "
        "the backbone. Give --input=uint8 too, or leave input_size out."
      )

  def shape(self, side: int) -> tuple[str, int | str, int | str, int]:
    """Return the shape of a batch; strings stand for axes of any length."""
    fixed = (side, side) if self.kind == "float32" else self.size
    height, width = fixed or ("h", "w")
    return "b", height, width, 3


def parse_size(text: str) -> tuple[int, int]:
  """Parse "HEIGHTxWIDTH" as (height, width)."""
  match = _SIZE.fullmatch(text)
  if not match:
    raise ExportError(
      f"input_size is {brief(text)}, expected HEIGHTxWIDTH in pixels, such as "
      "480x640."
    )
  return int(match[1]), int(match[2])

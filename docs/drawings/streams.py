"""The two streams of a forward pass."""

from docs.drawings.canvas import Canvas
from docs.drawings.masks import READS

_LEFT, _RIGHT = (24, 212), (352, 230)  # left edge and width of a stream
# The tasks of the drawing of the mask, of which one reads the other.
((_READER, (_PARENT,)),) = READS.items()


def draw() -> Canvas:
  """Draw the backbone stream on the left, the task stream on the right."""
  canvas = Canvas(
    640,
    500,
    "Two streams: the backbone hands keys and values to the tasks, and "
    "nothing goes back",
  )
  _heads(canvas)
  _blocks(canvas)
  _tokens(canvas)
  canvas.legend(
    (120, 484), {"learned": "learned", "frozen": "frozen, shared by both"}
  )
  return canvas


def _heads(canvas: Canvas) -> None:
  canvas.text((130, 30), "backbone stream", bold=True, size=17)
  canvas.text((130, 50), "the plain ViT, as it was", "muted")
  canvas.text((467, 30), "task stream", bold=True, size=17)
  canvas.text((467, 50), "one token for each task", "muted")
  canvas.box((55, 68), (150, 34), "original head", "given")
  canvas.box((342, 68), (120, 34), f"head “{_PARENT}”", "learned")
  canvas.box((472, 68), (120, 34), f"head “{_READER}”", "learned")


def _blocks(canvas: Canvas) -> None:
  canvas.box((10, 126), (620, 226), kind="open", dashed=True)
  canvas.text((294, 150), "each block", "muted")
  for x, width in (_LEFT, _RIGHT):
    canvas.box((x, 166), (width, 40), "LayerNorm, MLP")
  canvas.box((_LEFT[0], 256), (212, 66), ["attention", "to itself alone"])
  canvas.box(
    (_RIGHT[0], 256),
    (230, 66),
    ["attention", "to the backbone, itself,", "and its memory"],
  )
  canvas.arrow((236, 289), (350, 289))
  canvas.text((291, 280), "keys, values")
  canvas.text((291, 309), "never back", "muted")
  canvas.box((592, 266), (30, 46), "m", "learned")
  canvas.arrow((592, 289), (584, 289), ink="orange")
  canvas.text((626, 234), "memory,", "orange", anchor="end", size=14)
  canvas.text((626, 252), "m cells", "orange", anchor="end", size=14)
  for x, first in ((130, 400), (402, 400), (532, 400)):
    for start, end in ((first, 324), (256, 208), (166, 104)):
      canvas.arrow((x, start), (x, end))


def _tokens(canvas: Canvas) -> None:
  canvas.box((24, 402), (54, 34), "CLS", "given")
  for i in range(5):
    canvas.box((84 + 31 * i, 402), (27, 34), kind="given")
  canvas.text((130, 458), "class token and patches", "muted")
  canvas.box((352, 402), (100, 34), f"“{_PARENT}”", "learned")
  canvas.box((482, 402), (100, 34), f"“{_READER}”", "learned")
  canvas.arrow((452, 419), (480, 419), ink="orange", dashed=True)
  canvas.text(
    (467, 458), "extension: a task may read others", "orange", size=14
  )

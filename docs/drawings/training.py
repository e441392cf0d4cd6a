"""Drawing of a training step, in three ways."""

from docs.drawings.canvas import Canvas

_TOP, _STEP, _BLOCKS = 98, 52, 4


def draw() -> Canvas:
  """Draw full fine-tuning, one masked sequence, and two streams."""
  canvas = Canvas(
    640,
    420,
    "A training step: full fine-tuning and a masked sequence go back through "
    "every block, two streams only through the tokens of the tasks",
  )
  for x, name, about in (
    (110, "full fine-tuning", "all weights learn"),
    (320, "masked sequence", "memory learns"),
    (530, "memory_vit", "memory learns"),
  ):
    canvas.text((x, 30), name, bold=True, size=17)
    canvas.text((x, 52), about, "muted")
  bottom = _TOP + _STEP * _BLOCKS
  for i in range(_BLOCKS):
    y = _TOP + _STEP * i
    canvas.box((60, y), (100, 38), "block", "learned")
    canvas.box((262, y), (84, 38), "block")
    canvas.box((352, y + 7), (24, 24), kind="learned")
    canvas.box((444, y), (84, 38), "block")
    canvas.box((562, y), (44, 38), "task", "learned")
    canvas.arrow((528, y + 19), (560, y + 19))
  for x in (36, 238, 422):
    canvas.arrow((x, bottom), (x, _TOP - 16), ink="blue", width=3)
  for x in (184, 402, 622):
    canvas.arrow((x, _TOP - 16), (x, bottom), ink="orange", width=3)
  canvas.text((110, bottom + 26), "forward, back")
  canvas.text((320, bottom + 26), "forward, back")
  canvas.text((530, bottom + 26), "forward")
  canvas.text((110, bottom + 46), "through all tokens", "muted", size=14)
  canvas.text((320, bottom + 46), "through all tokens", "muted", size=14)
  canvas.text((530, bottom + 46), "back: task tokens alone", "muted", size=14)
  canvas.legend((150, 400), {"learned": "learns", "frozen": "frozen"})
  canvas.text((330, 400), "blue line: forward", "blue", anchor="start", size=14)
  canvas.text(
    (480, 400), "orange: gradients", "orange", anchor="start", size=14
  )
  return canvas

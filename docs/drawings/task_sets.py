"""Tasks that come and go while images are answered."""

from docs.drawings.canvas import Canvas

_SLOTS = ("birds", "pets", "", "breeds")


def draw() -> Canvas:
  """Draw a batch on its way through one backbone and the slots."""
  canvas = Canvas(
    640, 400, "A set of tasks in slots: a batch passes the backbone once"
  )
  canvas.box(
    (20, 120), (110, 100), ["batch", "padded to", "1, 8 or 32"], "given"
  )
  canvas.box((180, 120), (130, 100), ["backbone", "encode:", "one program"])
  canvas.arrow((130, 170), (178, 170))
  canvas.text((430, 40), "slots", bold=True, size=17)
  canvas.text((430, 62), "read: one program", "muted")
  for i, name in enumerate(_SLOTS):
    y = 80 + 56 * i
    kind = "learned" if name else "open"
    words = f"“{name}”" if name else "free, masked"
    canvas.box((370, y), (120, 44), words, kind, dashed=not name)
    canvas.arrow((310, 170), (340, 170), (340, y + 22), (368, y + 22))
    if name:
      canvas.arrow((490, y + 22), (538, y + 22))
      canvas.text((544, y + 27), "logits", anchor="start")
  canvas.arrow((245, 220), (245, 276))
  canvas.text((245, 296), "original outputs:")
  canvas.text((245, 316), "the same bits, always", "muted")
  canvas.arrow((430, 354), (430, 304), ink="orange")
  canvas.text((430, 372), "add, replace, remove: compiles nothing", "orange")
  canvas.text((430, 391), "as long as there is room", "muted", size=14)
  return canvas

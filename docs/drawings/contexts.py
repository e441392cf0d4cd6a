"""Cached keys and values: the frozen pass of an image is computed once."""

from docs.drawings.canvas import Canvas


def draw() -> Canvas:
  """Draw what happens once above what happens in each step."""
  canvas = Canvas(640, 350, "Cached keys and values: the backbone runs once")
  canvas.text(
    (20, 34), "once for every image", bold=True, anchor="start", size=17
  )
  canvas.box((20, 52), (130, 60), ["images", "no random crop"], "given")
  canvas.box((200, 52), (165, 60), ["backbone", "one forward pass"])
  canvas.box((410, 52), (210, 60), ["rows", "keys, values of all layers"])
  canvas.arrow((150, 82), (198, 82))
  canvas.arrow((365, 82), (408, 82))
  canvas.text((515, 134), "device, host or disk", "muted")

  canvas.text((20, 186), "in each step", bold=True, anchor="start", size=17)
  canvas.box((410, 204), (210, 60), ["rows of the batch", "drawn at random"])
  canvas.arrow((515, 144), (515, 202), ink="blue")
  canvas.box(
    (200, 204), (165, 60), ["task tokens", "read, with memory"], "learned"
  )
  canvas.box((20, 204), (130, 60), ["loss", "of every task"], "given")
  canvas.arrow((410, 224), (367, 224), ink="blue")
  canvas.arrow((200, 224), (152, 224), ink="blue")
  canvas.arrow((150, 248), (198, 248), ink="orange")
  canvas.text((320, 302), "No pass through the backbone is left in a step:")
  canvas.text(
    (320, 324),
    "in float32 its bits are those of a step that computes it.",
    "muted",
  )
  return canvas

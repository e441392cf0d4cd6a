"""Who attends to whom: Table 1 of the paper, with three tasks."""

from docs.drawings.canvas import Canvas

# Keys: name, columns; their owner is None for the backbone.
_KEYS = (
  ("CLS and patches", 4, None),
  ("token", 1, "pets"), ("memory", 2, "pets"),
  ("token", 1, "birds"), ("memory", 2, "birds"),
  ("token", 1, "breeds"), ("memory", 2, "breeds"),
)  # fmt: skip
_QUERIES = (("CLS", None), ("patches", None), ("“pets”", "pets"),
            ("“birds”", "birds"), ("“breeds”", "breeds"))  # fmt: skip
READS = {"breeds": ("pets",)}  # the one extension
_LEFT, _TOP, _SIDE, _GAP = 110, 118, 34, 12


def sees(query: str | None, key: str | None) -> bool:
  """Whether tokens of a task attend to what another has; None: backbone."""
  if key is None:
    return True
  return query is not None and (query == key or key in READS.get(query, ()))


def draw() -> Canvas:
  """Draw queries as rows and keys as columns."""
  canvas = Canvas(
    640,
    404,
    "Who attends to whom: the backbone to itself alone, pets and birds to the "
    "backbone and themselves, breeds to pets as well",
  )
  canvas.text((320, 30), "Who attends to whom", bold=True, size=17)
  canvas.text((20, 106), "queries", "muted", anchor="start", size=14)
  for row, (name, owner) in enumerate(_QUERIES):
    y = _TOP + row * (_SIDE + 6) + (10 if row > 1 else 0)
    canvas.text((100, y + 22), name, anchor="end")
    _row(canvas, y, owner)
  _names(canvas)
  canvas.legend(
    (110, 352), {"frozen": "of the backbone", "learned": "of a task",
                 "open": "not seen"}
  )  # fmt: skip
  canvas.text(
    (320, 386),
    "t: its token. Pets and birds are concatenated; breeds extends pets.",
    "muted",
  )
  return canvas


def _row(canvas: Canvas, y: float, query: str | None) -> None:
  x = float(_LEFT)
  for _, columns, key in _KEYS:
    for _ in range(columns):
      own = "frozen" if key is None else "learned"
      kind = own if sees(query, key) else "open"
      canvas.box((x, y), (_SIDE - 3, _SIDE), kind=kind)
      x += _SIDE
    x += _gap(key, columns)


def _gap(key: str | None, columns: int) -> float:
  """Between owners only; after the one column of a token comes its memory."""
  return _GAP if key is None or columns > 1 else 0


def _names(canvas: Canvas) -> None:
  x = float(_LEFT)
  for name, columns, key in _KEYS:
    width = columns * _SIDE
    if key is None:
      canvas.text((x + width / 2, 82), name)
    elif columns == 1:
      canvas.text((x + 1.5 * _SIDE, 60), f"“{key}”")
      canvas.text((x + 15, 106), "t", "muted", size=14)
    else:
      canvas.text((x + width / 2 - 2, 106), "memory", "muted", size=14)
    x += width + _gap(key, columns)
  canvas.text((_LEFT + 2 * _SIDE, 106), "keys", "muted", size=14)

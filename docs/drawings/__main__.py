"""Write every drawing beside the pages of docs/: `python -m docs.drawings`."""

from pathlib import Path

from docs.drawings.pictures import PICTURES

for name, draw in PICTURES.items():
  path = Path(__file__).resolve().parents[1] / f"{name}.svg"
  path.write_text(draw().svg(), encoding="utf-8")
  print(path)

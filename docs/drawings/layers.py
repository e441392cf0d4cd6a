"""The layers of the package, from the contract that `make lint` checks."""

import tomllib
from pathlib import Path

from docs.drawings.canvas import Canvas

ROOT = Path(__file__).resolve().parents[2]
_WIDTH, _LINE, _GAP = 640, 30, 10
_COMMANDS = "commands"


def layers() -> list[list[str]]:
  """Names of the subpackages, the highest layer first; siblings together."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  contract = project["tool"]["importlinter"]["contracts"][0]
  return [
    [name.strip().removeprefix("memory_vit.") for name in layer.split("|")]
    for layer in contract["layers"]
  ]


def draw() -> Canvas:
  """Draw a row for each layer."""
  found = layers()
  height = 62 + len(found) * (_LINE + _GAP)
  canvas = Canvas(_WIDTH, height, "The layers of the package: imports go down")
  canvas.text((_WIDTH / 2, 30), "Imports go down", bold=True, size=17)
  for i, names in enumerate(found):
    y = 46 + i * (_LINE + _GAP)
    width = (_WIDTH - 120 - _GAP * (len(names) - 1)) / len(names)
    for j, name in enumerate(names):
      package = "frozen" if _is_package(name) else "given"
      kind = "learned" if name == _COMMANDS else package
      x = 60 + j * (width + _GAP)
      canvas.box((x, y), (width, _LINE), name, kind)
  canvas.arrow((30, 50), (30, height - 20))
  canvas.arrow((_WIDTH - 30, 50), (_WIDTH - 30, height - 20))
  return canvas


def _is_package(name: str) -> bool:
  return (ROOT / "memory_vit" / name).is_dir()

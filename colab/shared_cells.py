"""Write what all notebooks share: the badge, and the cells of the set-up.

  python colab/shared_cells.py [--repository=OWNER/NAME]

Copies the set-up of quickstart.ipynb to the other notebooks. Its first line is
the project's GitHub repository, to which the badges link; --repository changes
it in all notebooks, and without one there are no badges. The second line is the
tag of the version in memory_vit/version.py, which the badges and the set-up
use. Other cells are not changed.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent
SOURCE = DIRECTORY / "quickstart.ipynb"
VERSION = DIRECTORY.parent / "memory_vit" / "version.py"
SHARED = ("set-up-text", "set-up")
BADGE = "badge"
_REPOSITORY = re.compile(r'^REPOSITORY = "([\w./-]*)"', re.MULTILINE)
_TAG = re.compile(r'^TAG = "[\w.-]+"', re.MULTILINE)

Notebook = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--repository", type=_repository, help="OWNER/NAME")
  repository = parser.parse_args(argv).repository
  source = read(SOURCE)
  cell = cells(source)["set-up"]
  text = _TAG.sub(f'TAG = "{tag()}"', "".join(cell))
  if repository:
    text = _REPOSITORY.sub(f'REPOSITORY = "{repository}"', text)
  cell[:] = text.splitlines(keepends=True)
  for path in sorted(DIRECTORY.glob("*.ipynb")):
    notebook = with_shared(
      source if path == SOURCE else read(path), path, source
    )
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def read(path: Path) -> Notebook:
  return json.loads(path.read_text(encoding="utf-8"))


def cells(notebook: Notebook) -> dict[str, list[str]]:
  """{id of a cell: its lines}, which can be changed in place."""
  return {cell["id"]: cell["source"] for cell in notebook["cells"]}


def tag() -> str:
  """The tag of this version, read without importing the package."""
  text = VERSION.read_text(encoding="utf-8")
  return "v" + re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)[1]


def repository_of(notebook: Notebook) -> str:
  """OWNER/NAME of the set-up cell, or ""."""
  return _REPOSITORY.search("".join(cells(notebook)["set-up"]))[1]


def with_shared(notebook: Notebook, path: Path, source: Notebook) -> Notebook:
  """The notebook with the set-up of `source`, and its own badge."""
  repository = repository_of(source)
  others = [cell for cell in notebook["cells"] if cell["id"] != BADGE]
  badge = [_badge(repository, path.name)] if repository else []
  notebook["cells"] = badge + others
  own, shared = cells(notebook), cells(source)
  for cell in SHARED:
    own[cell][:] = list(shared[cell])
  return notebook


def _badge(repository: str, name: str) -> Notebook:
  """The cell that opens a notebook on Colab."""
  colab = "https://colab.research.google.com"
  address = f"github/{repository}/blob/{tag()}/colab/{name}"
  image = f"![Open in Colab]({colab}/assets/colab-badge.svg)"
  return {
    "cell_type": "markdown", "id": BADGE, "metadata": {},
    "source": [f"[{image}]({colab}/{address})"],
  }  # fmt: skip


def _repository(text: str) -> str:
  parts = {*text.split("/")}
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", text) or parts & {".", ".."}:
    raise argparse.ArgumentTypeError(f"{text!r}: expected OWNER/NAME")
  return text


if __name__ == "__main__":
  main()

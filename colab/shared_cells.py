"""Write what all notebooks share: the badge, and the cells of the set-up.

  python colab/shared_cells.py [--repository=OWNER/NAME]

The set-up of quickstart.ipynb is copied to the others. Its first line says
where the project lies on GitHub, which is where the badges lead; --repository
changes it everywhere. Nothing else in the notebooks is touched.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent
SOURCE = DIRECTORY / "quickstart.ipynb"
SHARED = ("set-up-text", "set-up")
BADGE = "badge"
_BRANCH = "main"
_REPOSITORY = re.compile(r'^REPOSITORY = "([\w.-]+/[\w.-]+)"', re.MULTILINE)

Notebook = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--repository", type=_repository, help="OWNER/NAME")
  repository = parser.parse_args(argv).repository
  source = read(SOURCE)
  if repository:
    cell = cells(source)["set-up"]
    text = _REPOSITORY.sub(f'REPOSITORY = "{repository}"', "".join(cell))
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
  """{id of a cell: its lines}; the lines can be changed in place."""
  return {cell["id"]: cell["source"] for cell in notebook["cells"]}


def repository_of(notebook: Notebook) -> str:
  """Where the project lies on GitHub, by the set-up cell: OWNER/NAME."""
  return _REPOSITORY.search("".join(cells(notebook)["set-up"]))[1]


def with_shared(notebook: Notebook, path: Path, source: Notebook) -> Notebook:
  """The notebook with the set-up of `source`, and its own badge."""
  colab = "https://colab.research.google.com"
  address = f"github/{repository_of(source)}/blob/{_BRANCH}/colab/{path.name}"
  badge = (
    f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/{address})"
  )
  own, shared = cells(notebook), cells(source)
  own[BADGE][:] = [badge]
  for cell in SHARED:
    own[cell][:] = list(shared[cell])
  return notebook


def _repository(text: str) -> str:
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
    raise argparse.ArgumentTypeError(f"{text!r}: expected OWNER/NAME")
  return text


if __name__ == "__main__":
  main()

"""Execute the notebooks, and write them with their figures into docs/.

  python colab/render.py [NAME ...]

Each becomes docs/notebooks/NAME.md, with its figures beside it as small PNG
files, without the set-up, the training log and the badge. `make notebooks`
renders all of them in some minutes. tests/test_notebooks.py finds pages that
are older than their notebook.
"""

import argparse
import base64
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

COLAB = Path(__file__).resolve().parent
PAGES = COLAB.parent / "docs" / "notebooks"
NAMES = ("quickstart", "many_tasks", "sweep", "memory_attention",
         "your_backbone")  # fmt: skip
# It downloads its backbone, so its page has no outputs.
NOT_EXECUTED = "your_backbone"
_LEFT_OUT = {"badge", "set-up-text", "set-up"}
_COLOURS = 256


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("names", nargs="*", metavar="NAME")
  names = parser.parse_args(argv).names or NAMES
  PAGES.mkdir(exist_ok=True)
  for name in names:
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    if name != NOT_EXECUTED:
      _execute(notebook)
    for old in PAGES.glob(f"{name}.*.png"):
      old.unlink()
    text = "\n\n".join(page(name, notebook)) + "\n"
    (PAGES / f"{name}.md").write_text(text, encoding="utf-8")


def _execute(notebook: Any) -> None:
  """Run all cells in a temporary directory."""
  with tempfile.TemporaryDirectory() as directory:
    NotebookClient(
      notebook,
      timeout=1_800,
      kernel_name="python3",
      resources={"metadata": {"path": directory}},
    ).execute()


def page(name: str, notebook: Any) -> Iterator[str]:
  """Yield the parts of a page; writes the figures."""
  where = f"[`colab/{name}.ipynb`](../../colab/{name}.ipynb)"
  executed = name != NOT_EXECUTED
  how = "executed on 2 CPU cores" if executed else "not executed here"
  for cell in notebook.cells:
    if cell.id in _LEFT_OUT:
      continue
    if cell.cell_type == "markdown":
      yield cell.source
      if cell.id == "title":
        yield f"The notebook {where}, {how}, without its set-up."
      continue
    yield f"```python\n{cell.source}\n```"
    yield from _outputs(name, cell)


def _outputs(name: str, cell: Any) -> Iterator[str]:
  """The text and the figures of a cell, without the training log."""
  printed = "".join(
    output.get("text") or output.get("data", {}).get("text/plain", "")
    for output in cell.outputs
    if output.get("name") != "stderr"
    and "image/png" not in output.get("data", {})
  )
  if shown := printed.strip("\n"):
    yield f"```text\n{shown}\n```"
  figures = [
    output.data["image/png"]
    for output in cell.outputs
    if "image/png" in output.get("data", {})
  ]
  for number, figure in enumerate(figures, start=1):
    file = PAGES / f"{name}.{cell.id}.{number}.png"
    with Image.open(io.BytesIO(base64.b64decode(figure))) as image:
      small = image.convert("RGB").quantize(_COLOURS)
      small.save(file, optimize=True)
    yield f"![{cell.id} of {name}]({file.name})"


if __name__ == "__main__":
  main()

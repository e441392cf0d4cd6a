"""Write the list of modules in docs/dev/architecture.md.

python -m docs.modules
"""

import ast
from pathlib import Path

from memory_vit.runtime.tables import markdown_table

_ROOT = Path(__file__).resolve().parents[1]
PAGE = _ROOT / "docs" / "dev" / "architecture.md"
_BEGINS, _ENDS = "<!-- modules -->", "<!-- end of modules -->"
# A link to configs/, which the wheel contains under this name.
_LINKED = "configs"


def with_modules(page: str) -> str:
  """Replace the lines between the markers of a page."""
  before, _, rest = page.partition(_BEGINS)
  _, _, after = rest.partition(_ENDS)
  return f"{before}{_BEGINS}\n\n{_sections()}\n\n{_ENDS}{after}"


def _sections() -> str:
  package = _ROOT / "memory_vit"
  folders = sorted(
    {path.parent for path in package.rglob("*.py")} - {package / _LINKED}
  )
  return "\n\n".join(_section(folder, package) for folder in folders)


def _section(folder: Path, package: Path) -> str:
  """A heading, the purpose of a folder, and a row for each module."""
  rows = [
    (f"`{path.name}`", _first_line(path))
    for path in sorted(folder.glob("*.py"))
    if path.name != "__init__.py"
  ]
  title = folder.relative_to(package.parent).as_posix()
  parts = [f"### {title}/", _first_line(folder / "__init__.py")]
  if rows:
    parts.append(markdown_table(("module", "contents"), rows))
  return "\n\n".join(parts)


def _first_line(path: Path) -> str:
  text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
  return text.partition("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
  PAGE.write_text(with_modules(PAGE.read_text("utf-8")), encoding="utf-8")
  print(PAGE)

"""The fenced blocks of the README, CONTRIBUTING.md and the pages of docs/.

And the commands in the docstrings of configurations.
"""

import ast
import dataclasses
import itertools
import re
import shlex
import textwrap
from pathlib import Path

from conftest import ROOT
from markdown_it import MarkdownIt

PAGES = (
  ROOT / "README.md",
  ROOT / "CONTRIBUTING.md",
  *sorted((ROOT / "docs").glob("*.md")),
  *sorted((ROOT / "docs" / "reference").glob("*.md")),
  *sorted((ROOT / "docs" / "dev").glob("*.md")),
)
CONFIGS = tuple(
  path
  for path in sorted((ROOT / "configs").glob("*.py"))
  if path.stem not in ("__init__", "base")
)
# Language of a fence -> what is done with the block. Without one it is for a
# shell: what is not to be executed has to say what it is.
KINDS = {
  "": "shell",
  "bash": "shell",
  "sh": "shell",
  "shell": "shell",
  "python": "python",
  # Shown, not executed: output, a layout of files, answers, settings, drawings.
  "bibtex": "shown",
  "ini": "shown",
  "json": "shown",
  "mermaid": "shown",
  "text": "shown",
  "toml": "shown",
  "yaml": "shown",
}
_SHELL = {"&", "&&", "|", "||", ";", ">", ">>", "<", ")"}
_PACKAGE = re.compile(
  r"(?:-m memory_vit\.|\bmemory-vit |-m (?=studies))(studies\.\w+|\w+)\b(.*)"
)


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block; `line` is that of its first line, in the file."""

  page: Path
  line: int
  language: str
  text: str

  @property
  def name(self) -> str:
    """FILE:LINE, as editors open it."""
    return f"{self.page.relative_to(ROOT)}:{self.line}"

  @property
  def kind(self) -> str:
    """`shell`, `python`, `shown`, or "" for a language that is not known."""
    return KINDS.get(self.language, "")

  def package_commands(self) -> list[tuple[str, list[str]]]:
    """Commands of the package: name and arguments."""
    lines = self.text.replace("\\\n", " ").splitlines()
    found = [match for line in lines if (match := _PACKAGE.search(line))]
    return [
      ("train" if m[1] == "main" else m[1], _arguments(m[2])) for m in found
    ]


def _arguments(text: str) -> list[str]:
  """Those of a command, up to a comment, or what else a shell knows."""
  # Of a command within a quoted one, the last quotation mark is not its own.
  words = shlex.split(text[:-1] if text.count('"') % 2 else text, True)
  return [*itertools.takewhile(lambda word: word not in _SHELL, words)]


def blocks_of(page: Path) -> list[Block]:
  """All fenced blocks of a page, those within lists too, or of a docstring."""
  text = page.read_text(encoding="utf-8")
  if page.suffix == ".py":
    return _in_docstring(page, text)
  return [
    Block(page, token.map[0] + 2, token.info.strip(), token.content)
    for token in MarkdownIt("commonmark").parse(text)
    if token.type == "fence" and token.map
  ]


def _in_docstring(page: Path, text: str) -> list[Block]:
  """The indented commands of the docstring of a module."""
  (first, *_) = ast.parse(text).body
  docstring = first.value.value
  return [
    Block(
      page,
      docstring[: found.start()].count("\n") + 1,
      "sh",
      textwrap.dedent(found[0]),
    )
    for found in re.finditer(r"(?:^  .+\n)+", docstring, re.M)
    if re.match(r" +(make|memory-vit|python -m studies\.\w+) ", found[0])
  ]


def all_blocks() -> list[Block]:
  """Those of all pages."""
  return [block for page in PAGES for block in blocks_of(page)]

"""The README as a package index shows it, where relative links lead nowhere."""

import re
from collections.abc import Iterator

_IMAGE = re.compile(r"^(!\[[^\]]*\])\((?!https?://)([^)\s]+)\)", re.M)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
# A section about the checkout, which an index does not have.
_CHECKOUT = re.compile(r"^## [^\n]*\bcheckout\n.*?(?=^## )", re.M | re.S)
# The package from the checkout, with or without extras.
_HERE = re.compile(r"(?<=pip install )(?:\.(?=\s)|'\.(\[[\w,]+\])')")
_FENCE = "```"
# Up to the fence that ends it, or the end of the page; in lists it is indented.
_CODE = re.compile(r"(^[ \t]*```.*?(?:^[ \t]*```[^\n]*$|\Z))", re.M | re.S)


def for_index(text: str, version: str, repository: str = "") -> str:
  """Make links of a README absolute, or leave out what has them.

  Code that is fenced stays as it is, but what it installs from the checkout is
  then on the index.

  Args:
    text: of the README, whose links are relative to the checkout.
    version: whose tag, "v1.2.3", the links are to lead to.
    repository: the address of the repository, as a browser opens it. Where
      there is none, nothing may send a reader to files that he does not have:
      paragraphs, lists and tables with a relative link or image go, and
      headings under which nothing is left.
  """
  text = _HERE.sub(_by_name, text)
  if not repository:
    text = _CHECKOUT.sub("", text)
    return "\n\n".join(_with_content(list(_without_files(text)))) + "\n"
  base = repository.rstrip("/")
  parts = _CODE.split(text)
  for i in range(0, len(parts), 2):  # the others are code
    part = _IMAGE.sub(rf"\1({base}/raw/v{version}/\2)", parts[i])
    parts[i] = _LINK.sub(rf"[\1]({base}/blob/v{version}/\2)", part)
  return "".join(parts)


def _by_name(here: re.Match[str]) -> str:
  """The package as an index knows it."""
  return f"'memory_vit{here[1]}'" if here[1] else "memory_vit"


def _without_files(text: str) -> Iterator[str]:
  """The blocks of a page that lead to no file."""
  for block in _blocks(text):
    words = _CODE.sub("", block)
    if not (_LINK.search(words) or _IMAGE.search(words)):
      yield block


def _blocks(text: str) -> Iterator[str]:
  """Yield blocks that empty lines separate; fenced code stays together."""
  lines: list[str] = []
  fenced = False
  for line in [*text.splitlines(), ""]:
    fenced ^= line.lstrip().startswith(_FENCE)
    if line or fenced:
      lines.append(line)
    elif lines:
      yield "\n".join(lines)
      lines = []


def _with_content(blocks: list[str]) -> list[str]:
  """All but headings that are followed by one of their level, or by nothing."""
  kept: list[str] = []
  for block in reversed(blocks):
    level, next_level = _level(block), _level(kept[-1] if kept else "#")
    if not level or not next_level or next_level > level:
      kept.append(block)
  return kept[::-1]


def _level(block: str) -> int:
  """Return the level of a heading: 1 for the title; 0 if it is no heading."""
  return len(block) - len(block.lstrip("#")) if block.startswith("#") else 0

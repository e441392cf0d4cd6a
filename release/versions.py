"""The version of a release, in the files that state it."""

import ast
import re
from pathlib import Path

from release.errors import ReleaseError

_RELEASED = re.compile(r"^## \[(\d+\.\d+\.\d+\S*)\] - (\d{4}-\d\d-\d\d)$", re.M)


def version_of(root: Path) -> str:
  """The version, where package, changelog and citation agree on it.

  Args:
    root: of the checkout.

  Raises:
    ReleaseError: where they do not; it names each file and what it states.
  """
  packed = _packed(root / "memory_vit" / "version.py")
  newest, released = _newest(root / "CHANGELOG.md")
  cited = _cited(root / "CITATION.cff", "version")
  if not packed == newest == cited:
    raise ReleaseError(
      f"the versions differ: memory_vit/version.py has {packed}, the newest "
      f"in CHANGELOG.md is {newest}, CITATION.cff has {cited}."
    )
  published = _cited(root / "CITATION.cff", "date-released")
  if released != published:
    raise ReleaseError(
      f"the dates of {packed} differ: {released} in CHANGELOG.md, {published} "
      "in CITATION.cff."
    )
  return packed


def _packed(path: Path) -> str:
  """`__version__`, read without importing anything."""
  for line in ast.parse(path.read_text(encoding="utf-8")).body:
    if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
      (target,) = line.targets
      if isinstance(target, ast.Name) and target.id == "__version__":
        return str(line.value.value)
  raise ReleaseError(f"{path} assigns no __version__.")


def _newest(path: Path) -> tuple[str, str]:
  """Version and date of the first release in the changelog."""
  found = _RELEASED.search(path.read_text(encoding="utf-8"))
  if found is None:
    raise ReleaseError(
      f"{path} has no release, expected a heading '## [1.2.3] - 2026-01-31'."
    )
  return found[1], found[2]


def _cited(path: Path, key: str) -> str:
  """A value of the citation file, from a line of its own."""
  text = path.read_text(encoding="utf-8")
  found = re.search(rf"^{key}: *['\"]?([^'\"\s]+)['\"]? *$", text, re.M)
  if found is None:
    raise ReleaseError(f"{path} has no line '{key}: ...'.")
  return found[1]

"""Address of the project in all files of a release."""

import argparse
import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from release.errors import ReleaseError

# As GitHub has it; Colab opens notebooks from there.
_REPOSITORY = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?")
_URLS = "[project.urls]\n"


def repository(text: str) -> str:
  """The address of a repository as a flag has it, without what may follow.

  Args:
    text: of the flag; "" where there is no address.

  Raises:
    argparse.ArgumentTypeError: for any other address.
  """
  if not text:
    return ""
  found = _REPOSITORY.fullmatch(text)
  if found is None or not all(map(_is_name, found[1].split("/"))):
    raise argparse.ArgumentTypeError(
      f"{text!r}: expected https://github.com/OWNER/NAME"
    )
  return f"https://github.com/{found[1]}"


def _is_name(text: str) -> bool:
  """Return whether GitHub allows the name: no directory, no second ".git"."""
  return text not in (".", "..") and not text.endswith(".git")


def project_urls(text: str, version: str, address: str) -> str:
  """pyproject.toml with the addresses that an index shows.

  Args:
    text: of pyproject.toml.
    version: whose tag, "v1.2.3", they lead to.
    address: of the repository; "" changes nothing.

  Raises:
    ReleaseError: where it has no table of addresses.
  """
  if not address:
    return text
  if text.count(_URLS) != 1:
    raise ReleaseError(f"pyproject.toml: expected one table {_URLS.strip()}.")
  urls = {
    "Repository": address,
    "Documentation": f"{address}/tree/v{version}/docs",
    "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
  }
  lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
  return text.replace(_URLS, _URLS + lines)


def require_same(root: Path, version: str, address: str) -> None:
  """Refuse a checkout in which a file names another place or version.

  Args:
    root: of the checkout.
    version: of the release, whose tag the notebooks install.
    address: of the repository; where it is "", notebooks are compared with
      one another.

  Raises:
    ReleaseError: it names each file.
  """
  texts = {
    path.name: _text(path) for path in sorted((root / "colab").glob("*.ipynb"))
  }
  name = address.removeprefix("https://github.com/") or _most_named(texts)
  where, flag = (name, f" --repository={name}") if name else ("nowhere", "")
  wrong = [
    file
    for file, text in texts.items()
    if not _agrees(file, text, version, name)
  ]
  if wrong:
    raise ReleaseError(
      f"notebooks that install another version, or from another place, than "
      f"v{version} of {where}: {', '.join(wrong)}. "
      f"Run python colab/shared_cells.py{flag}, and commit."
    )
  citation = (root / "CITATION.cff").read_text(encoding="utf-8")
  line = f"repository-code: {address}"
  if address and line not in citation.splitlines():
    raise ReleaseError(
      f"CITATION.cff has no line '{line}': add it, and commit."
    )


def _text(path: Path) -> str:
  """All cells of a notebook."""
  stored = json.loads(path.read_text(encoding="utf-8"))
  return "\n".join("".join(cell["source"]) for cell in stored["cells"])


def _most_named(texts: Mapping[str, str]) -> str:
  """The OWNER/NAME from which most notebooks install, "" where none does."""
  text = "\n".join(texts.values())
  names = re.findall(r'^REPOSITORY = "([^"]*)"', text, re.M)
  return statistics.mode(names) if names else ""


def _agrees(file: str, text: str, version: str, name: str) -> bool:
  """Return whether a notebook installs the version that its badge names."""
  badge = f"/github/{name}/blob/v{version}/colab/{file})"
  return (
    f'REPOSITORY = "{name}"' in text
    and f'TAG = "v{version}"' in text
    and (badge in text if name else "colab-badge" not in text)
  )

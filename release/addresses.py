"""Where the project lies, in all that a release says of itself."""

import argparse
import json
import re
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
  if found is None:
    raise argparse.ArgumentTypeError(
      f"{text!r}: expected https://github.com/OWNER/NAME"
    )
  return f"https://github.com/{found[1]}"


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
    address: of the repository; where it is "", only versions are compared.

  Raises:
    ReleaseError: it names each file.
  """
  name = address.removeprefix("https://github.com/")
  wrong = [
    path.name
    for path in sorted((root / "colab").glob("*.ipynb"))
    if not _agrees(path, version, name)
  ]
  if wrong:
    flag = f" --repository={name}" if name else ""
    raise ReleaseError(
      f"notebooks that install another version, or from another place, than "
      f"v{version} of {address or 'what they all name'}: {', '.join(wrong)}. "
      f"Run python colab/shared_cells.py{flag}, and commit."
    )
  citation = (root / "CITATION.cff").read_text(encoding="utf-8")
  line = f"repository-code: {address}"
  if address and line not in citation.splitlines():
    raise ReleaseError(
      f"CITATION.cff has no line '{line}': add it, and commit."
    )


def _agrees(path: Path, version: str, name: str) -> bool:
  """Whether a notebook installs this version from here, as its badge says."""
  stored = json.loads(path.read_text(encoding="utf-8"))
  text = "\n".join("".join(cell["source"]) for cell in stored["cells"])
  if not name:
    found = re.search(r'^REPOSITORY = "([^"]+)"', text, re.M)
    name = found[1] if found else ""
  expected = (
    f'REPOSITORY = "{name}"', f'TAG = "v{version}"',
    f"/github/{name}/blob/v{version}/colab/{path.name})",
  )  # fmt: skip
  return all(each in text for each in expected)

"""Make one site of docs/ and of the files beside it that its pages lead to.

GitHub shows a page where it lies, so README.md leads to `docs/install.md`, and
a page of docs/ to `../memory_vit/tasks/inference.py`. The generator knows
docs/ alone. These hooks, which mkdocs.yml names, add to the site the pages of
the root under the names of `ROOT_PAGES`, and each other file that a link names
as a page that shows its text; then they turn the links to them. What a link
names and is not there stays as it is: the strict build refuses it.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pygments.formatters
from properdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
# Pages of the root, and what they are called on the site.
ROOT_PAGES = {
  "README.md": "index.md",
  "CONTRIBUTING.md": "contributing.md",
  "CHANGELOG.md": "changelog.md",
}
# What is handed over as a file, and not shown as text.
DOWNLOADS = {".ipynb", ".png", ".svg"}
# Pygments' colours for the two modes of the theme.
STYLES = {"light": "default", "dark": "github-dark"}
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_FENCE = re.compile(r"^(```.*?^```$)", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
  """Add the pages of the root, and the files that any page leads to."""
  files.append(File.generated(config, "pygments.css", content=_colours()))
  for name, uri in ROOT_PAGES.items():
    if (ROOT / name).is_file():
      files.append(_page(config, uri, (ROOT / name).read_text("utf-8")))
  pages = [(file.src_uri, file.content_string) for file in files if _is(file)]
  for uri, text in pages:
    for link in _LINK.findall(_without_code(text)):
      _add_target(files, config, _repository_path(uri, link))
  return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Turn links that leave docs/ to where the site has what they name."""
  uri = page.file.src_uri

  def turned(match: re.Match[str]) -> str:
    link = match[1]
    path = _repository_path(uri, link)
    if path is None or not (ROOT / path).is_file():
      return link
    _, hash_, anchor = link.partition("#")
    start = posixpath.dirname(uri) or "."
    return posixpath.relpath(_site_uri(path), start) + hash_ + anchor

  parts = _FENCE.split(markdown)
  parts[::2] = [_LINK.sub(turned, part) for part in parts[::2]]
  return "".join(parts)


def _colours() -> str:
  """Style sheet of highlighted code; the background stays the theme's."""
  rules = []
  for mode, style in STYLES.items():
    formatter = pygments.formatters.HtmlFormatter(style=style)
    scope = f"[data-bs-theme={mode}] .highlight"
    tokens = re.compile(rf"{re.escape(scope)} \.\w+ {{(?!.*background)")
    lines = formatter.get_style_defs(scope).splitlines()
    rules += [line for line in lines if tokens.match(line)]
  return "\n".join(rules)


def _is(file: File) -> bool:
  return bool(file.is_documentation_page())


def _without_code(text: str) -> str:
  return _FENCE.sub("", text)


def _repository_path(uri: str, link: str) -> str | None:
  """Path in the repository that a link of a page leads to, if it is one."""
  path = link.partition("#")[0]
  if not path or re.match(r"[a-z]+:", path):
    return None
  source = {site: name for name, site in ROOT_PAGES.items()}.get(uri)
  folder = posixpath.dirname(source if source else f"docs/{uri}")
  found = posixpath.normpath(posixpath.join(folder, path))
  return None if found.startswith("..") else found


def _site_uri(path: str) -> str:
  """Name a file of the repository as the site does."""
  if path in ROOT_PAGES:
    return ROOT_PAGES[path]
  if path.startswith("docs/"):
    return path.removeprefix("docs/")
  return f"source/{path}" + ("" if _is_download(path) else ".md")


def _is_download(path: str) -> bool:
  return Path(path).suffix in DOWNLOADS


def _add_target(files: Files, config: Any, path: str | None) -> None:
  """Add what a link names to the site, unless it is there."""
  if path is None or not (ROOT / path).is_file():
    return
  uri = _site_uri(path)
  if uri in files.src_uris:
    return
  if _is_download(path):
    files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
  else:
    files.append(_page(config, uri, "\n".join(_shown(path))))


def _shown(path: str) -> Iterator[str]:
  """The page that shows a file of text."""
  yield f"# {path}\n"
  yield "`" * 8 + _LANGUAGES.get(Path(path).suffix, "text")
  yield (ROOT / path).read_text("utf-8").rstrip("\n")
  yield "`" * 8


def _page(config: Any, uri: str, content: str) -> File:
  inclusion = InclusionLevel.UNDEFINED
  if uri.startswith("source/"):  # nobody looks for them in the navigation
    inclusion = InclusionLevel.NOT_IN_NAV
  return File.generated(config, uri, content=content, inclusion=inclusion)

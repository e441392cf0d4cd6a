"""The README and docs/ lead nowhere that is not there."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest
from conftest import ROOT

from docs import modules
from memory_vit.backbones.download import KNOWN
from memory_vit.config import Config

README = ROOT / "README.md"
DOCS = ROOT / "docs"
FOR_USERS = [
  README,
  *DOCS.glob("*.md"),
  *(DOCS / "reference").glob("*.md"),
  *(DOCS / "api").glob("*.md"),
]
PAGES = (
  *(page for page in FOR_USERS if page.parent != DOCS / "api"),
  ROOT / "CONTRIBUTING.md",
  *(DOCS / "dev").glob("*.md"),
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
  """What GitHub makes of the headings."""
  headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
  words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
  return {word.replace(" ", "-") for word in words}


def options(values, prefix=""):
  """Keys of options, and of what holds them: "data", "data.dir", ..."""
  for field in dataclasses.fields(values):
    yield prefix + field.name
    value = getattr(values, field.name)
    if dataclasses.is_dataclass(value):
      yield from options(value, f"{prefix}{field.name}.")


def test_readme_leads_to_every_page():
  """By docs/contents.md, which lists them."""
  contents = DOCS / "contents.md"
  assert "](docs/contents.md)" in README.read_text(encoding="utf-8")
  links = re.findall(r"\]\(([\w./]+\.md)\)", contents.read_text("utf-8"))
  listed = {(DOCS / link).resolve() for link in links}
  assert listed >= {*PAGES, *DOCS.glob("api/*.md")} - {README, contents}


@each_page
def test_links_have_targets(page):
  links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
  assert links or page != README
  for link in links:
    if re.match(r"https?://", link):
      continue
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.exists(), link
    assert not anchor or anchor in anchors(target), link


@each_page
def test_named_files_exist(page):
  folders = "memory_vit|configs|studies|tests|benchmarks|colab"
  text = page.read_text()
  names = re.findall(rf"\b(?:{folders})/[\w/]+\.\w+", text)
  assert names or page.name != "CONTRIBUTING.md"
  for name in names:
    assert (ROOT / name).is_file(), name
  modules = r"-m ((?:memory_vit|benchmarks|studies)\.[a-z]\w*)"
  for name in re.findall(modules, text):
    place = ROOT / name.replace(".", "/")
    file = place / "__main__.py" if place.is_dir() else f"{place}.py"
    assert Path(file).is_file(), name


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: page.name)
def test_pages_for_users_name_no_modules(page):
  """Only what `mv` and subpackages export, and commands: the rest may move."""
  text = page.read_text(encoding="utf-8")
  assert not re.findall(r"\bmemory_vit/[\w/]+\.py\b", text)
  tops = set(re.findall(r"\bmemory_vit\.([a-z]\w*)", text))
  modules = {path.stem for path in (ROOT / "memory_vit").glob("*.py")}
  assert tops & modules <= {"config", "main"}
  inside = re.findall(r"(?:from|-m) (memory_vit\.\w+)\.\w+", text)
  assert not inside, "imports from a module, not from its subpackage"
  for package, names in re.findall(
    r"^from memory_vit\.(\w+) import ([\w, ]+)$", text, re.M
  ):
    exported = importlib.import_module(f"memory_vit.{package}").__all__
    assert set(names.split(", ")) <= set(exported), package


def test_every_published_backbone_is_listed():
  text = (DOCS / "backbones.md").read_text(encoding="utf-8")
  named = re.findall(r"`((?:i21k|augreg)-[\w/]+)`", text)
  assert set(named) == {name for name in KNOWN if name != "glyphs"}


def test_list_of_modules_is_up_to_date():
  page = modules.PAGE.read_text(encoding="utf-8")
  assert modules.with_modules(page) == page, "run python -m docs.modules"
  assert "### memory_vit/model/parts/" in page


def test_classes_on_the_architecture_page_have_the_named_methods():
  text = modules.PAGE.read_text(encoding="utf-8")
  defined = {
    f"{node.name}.{member.name}"
    for path in (ROOT / "memory_vit").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef)
    for member in node.body
    if isinstance(member, ast.FunctionDef)
  }
  named = set(re.findall(r"`([A-Z]\w*[a-z]\w*\.\w+)`", text))
  assert "Encoder.read" in named
  assert named <= defined


def test_help_names_pages_of_the_repository():
  """A wheel has none of them: a reader has to look into the repository."""
  named = set()
  for path in (ROOT / "memory_vit" / "commands").glob("*.py"):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for name, after in re.findall(r"(docs/[\w/]+\.md)(.{0,18})", text, re.S):
      assert (ROOT / name).is_file(), path.name
      assert after.split() == ["of", "the", "repository"], path.name
      named.add(name)
  assert named


def test_commands_are_written_in_one_form():
  """`memory-vit COMMAND --config=NAME`; the other way is named once."""
  said = [
    *PAGES, *(ROOT / "colab").glob("*.ipynb"), *(ROOT / "configs").glob("*.py"),
    *(ROOT / "memory_vit").rglob("*.py"),
  ]  # fmt: skip
  other = r"-m memory_vit\.[a-z]+|--config=configs/|\.venv/bin/python"
  lines = [
    f"{path.name}: {line.strip()}"
    for path in said
    for line in path.read_text(encoding="utf-8").splitlines()
    if re.search(other, line)
  ]
  assert len(lines) == 1, "\n".join(lines)
  assert "-m memory_vit.main --config=configs/sun397.py" in lines[0]


@pytest.mark.parametrize("path", [*PAGES, *(ROOT / "colab").glob("*.ipynb")])
def test_pages_have_no_placeholder_address(path):
  """The release writes the one of the project, once there is one."""
  text = path.read_text(encoding="utf-8")
  assert not re.search(r"OWNER/memory_vit", text)


def test_package_is_not_installed_by_name_from_an_index():
  """Nothing is published yet: on an index, the name could be a stranger's."""
  said = [
    *PAGES, *(ROOT / "colab").glob("*.ipynb"),
    *(ROOT / "memory_vit").rglob("*.py"),
  ]  # fmt: skip
  by_name = r"memory_vit\[|pip install [^\n`]*\bmemory_vit\b"
  found = [p for p in said if re.search(by_name, p.read_text("utf-8"))]
  assert found == []


@each_page
def test_named_options_exist(page):
  named = re.findall(r"\bconfig\.([a-z]\w*(?:\.[a-z]\w*)*)", page.read_text())
  files = {"py", "json"}
  assert set(named) - files <= set(options(Config()))

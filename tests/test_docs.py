"""The README and docs/ lead nowhere that is not there."""

import ast
import dataclasses
import importlib
import re
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from memory_vit.__main__ import COMMANDS
from memory_vit.backbones.download import KNOWN
from memory_vit.config import Config

README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
MAINTAINERS = {"CONTRIBUTING.md", "architecture.md"}
FOR_USERS = [
  *(page for page in PAGES if page.name not in MAINTAINERS),
  *(ROOT / "docs" / "api").glob("*.md"),
]

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


def test_the_readme_is_short():
  assert len(README.read_text().splitlines()) <= 200


def test_the_readme_leads_to_every_page():
  linked = set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text()))
  assert linked == {f"docs/{page.name}" for page in PAGES[2:]}


@each_page
def test_links_lead_somewhere(page):
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
def test_files_that_are_named_are_there(page):
  folders = "memory_vit|configs|tests|benchmarks|colab"
  text = page.read_text()
  names = re.findall(rf"\b(?:{folders})/[\w/]+\.\w+", text)
  assert names or page.name != "CONTRIBUTING.md"
  for name in names:
    assert (ROOT / name).is_file(), name
  for name in re.findall(r"-m ((?:memory_vit|benchmarks)\.[a-z]\w*)", text):
    assert (ROOT / f"{name.replace('.', '/')}.py").is_file(), name


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: page.name)
def test_pages_for_users_name_no_modules(page):
  """Only what `mv` and the wings export, and commands: the rest may move."""
  text = page.read_text(encoding="utf-8")
  assert not re.findall(r"\bmemory_vit/[\w/]+\.py\b", text)
  tops = set(re.findall(r"\bmemory_vit\.([a-z]\w*)", text))
  modules = {path.stem for path in (ROOT / "memory_vit").glob("*.py")}
  assert tops & modules <= {"config", "main"}
  inside = re.findall(r"(?:from|-m) (memory_vit\.\w+)\.\w+", text)
  assert not inside, "imports from a module, not from its wing"
  for wing, names in re.findall(
    r"^from memory_vit\.(\w+) import ([\w, ]+)$", text, re.M
  ):
    exported = importlib.import_module(f"memory_vit.{wing}").__all__
    assert set(names.split(", ")) <= set(exported), wing


def test_every_published_backbone_is_named():
  text = (ROOT / "docs" / "many_tasks.md").read_text(encoding="utf-8")
  named = re.findall(r"`((?:i21k|augreg)-[\w/]+)`", text)
  assert named == [name for name in KNOWN if name != "glyphs"]


def test_the_architecture_is_that_of_the_code():
  """Its wings, commands and layers, each with what it is for."""
  text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
  rows = re.findall(r"^\| `(\w+)/` \| (\w.*\.) \|$", text, re.M)
  wings = {path.parent.name for path in (ROOT / "memory_vit").glob("*/*.py")}
  assert {name for name, _ in rows} == wings - {"commands", "configs"}
  assert len(rows) == len(wings) - 2
  head, body = text.split("On top of them are the commands", 1)
  numbers = {"twelve": len(COMMANDS), "nineteen": len(rows)}
  assert numbers == {"twelve": 12, "nineteen": 19}
  assert (
    " ".join(head.split()).count("twelve commands, and nineteen wings") == 1
  )
  named = re.findall(r"`(\w+)`", body.partition("(`memory-vit")[0])
  assert set(named) == set(COMMANDS)
  with (ROOT / "pyproject.toml").open("rb") as file:
    contract = tomllib.load(file)["tool"]["importlinter"]["contracts"][0]
  drawn = text.split("```text\n")[1].partition("```")[0].splitlines()
  assert [set(line.split(" | ")) for line in drawn] == [
    set(layer.replace("memory_vit.", "").split(" | "))
    for layer in contract["layers"]
  ]


def test_help_says_where_pages_are():
  """A wheel has none of them: a reader has to look into the repository."""
  named = set()
  for path in (ROOT / "memory_vit" / "commands").glob("*.py"):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for name, after in re.findall(r"(docs/\w+\.md)(.{0,18})", text, re.S):
      assert (ROOT / name).is_file(), path.name
      assert after.split() == ["of", "the", "repository"], path.name
      named.add(name)
  assert named


def test_commands_are_of_one_dialect():
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
def test_no_address_is_made_up(path):
  """The release writes the one of the project, once there is one."""
  text = path.read_text(encoding="utf-8")
  assert not re.search(r"OWNER/memory_vit", text)


@each_page
def test_options_that_are_named_exist(page):
  named = re.findall(r"\bconfig\.([a-z]\w*(?:\.[a-z]\w*)*)", page.read_text())
  files = {"py", "json"}
  assert set(named) - files <= set(options(Config()))

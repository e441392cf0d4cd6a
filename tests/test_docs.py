"""The README and docs/ lead nowhere that is not there."""

import dataclasses
import functools
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from memory_vit.config import Config

README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(page: Path) -> list[tuple[str, list[str]]]:
  """Commands of the package in fenced blocks: module and arguments."""
  text = page.read_text().replace("\\\n", " ")
  blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)
  lines = re.findall(r"-m memory_vit\.(\w+) (.*)", "\n".join(blocks))
  # Of a command within a quoted one, the last quotation mark is not its own.
  return [
    (module, shlex.split(rest[:-1] if rest.count('"') % 2 else rest, True))
    for module, rest in lines
  ]


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


@functools.cache
def flags(module: str) -> set[str]:
  """What --help of a command names."""
  done = subprocess.run(
    [sys.executable, "-m", f"memory_vit.{module}", "--help"],
    check=True, capture_output=True, text=True, cwd=ROOT,
  )  # fmt: skip
  return set(re.findall(r"--(\w+)", done.stdout))


def test_the_readme_is_short():
  assert len(README.read_text().splitlines()) <= 200


def test_the_readme_leads_to_every_page():
  linked = set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text()))
  assert linked == {f"docs/{page.name}" for page in PAGES[2:]}


@each_page
def test_links_lead_somewhere(page):
  links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
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
  for name in re.findall(rf"\b(?:{folders})/[\w/]+\.\w+", text):
    assert (ROOT / name).is_file(), name
  for name in re.findall(r"-m ((?:memory_vit|benchmarks)\.[a-z]\w*)", text):
    assert (ROOT / f"{name.replace('.', '/')}.py").is_file(), name


@each_page
def test_options_that_are_named_exist(page):
  named = re.findall(r"\bconfig\.([a-z]\w*(?:\.[a-z]\w*)*)", page.read_text())
  files = {"py", "json"}
  assert set(named) - files <= set(options(Config()))


@each_page
def test_commands_have_the_flags_that_they_are_given(page):
  for module, arguments in commands(page):
    used = {re.match(r"--(\w*)|", argument)[1] for argument in arguments}
    assert used - {None} <= flags(module), (module, arguments)


@each_page
def test_commands_have_the_options_that_they_are_given(page, monkeypatch):
  monkeypatch.chdir(ROOT)
  for module, arguments in commands(page):
    reads = module in ("main", "paper", "vtab", "check_data")
    if reads and "--config=..." not in arguments:
      command = importlib.import_module(f"memory_vit.{module}")
      assert command.parse([module, *arguments]), arguments


def test_commands_are_found():
  found = [command for page in PAGES for command in commands(page)]
  assert len(found) >= 20
  assert {module for module, _ in found} >= {
    "main", "paper", "vtab", "evaluate", "predict", "inspect", "check_data",
    "export", "serve",
  }  # fmt: skip

"""Each number of the README comes from a measurement, or is checked here."""

import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT
from markdown_it import MarkdownIt

from configs import quickstart
from docs import readme

RESULTS = ROOT / "docs" / "reference" / "results.md"


def text():
  return readme.PAGE.read_text(encoding="utf-8")


def sentences():
  """The words of the page outside blocks, tables, addresses and code."""
  tokens = MarkdownIt("commonmark").parse(text().replace(readme.table(), ""))
  children = [child for token in tokens for child in token.children or ()]
  return " ".join(c.content for c in children if c.type == "text")


def test_readme_is_short():
  assert len(text().splitlines()) <= 120


def test_table_is_that_of_the_benchmarks():
  assert readme.with_table(text()) == text(), "run python -m docs.readme"


def test_numbers_in_sentences_are_checked():
  """The year, and the versions of Python: no measurement is among them."""
  with (ROOT / "pyproject.toml").open("rb") as file:
    project = tomllib.load(file)["project"]
  versions = [
    line.rpartition(" ")[2]
    for line in project["classifiers"]
    if re.search(r":: 3\.\d+$", line)
  ]
  numbers = re.findall(r"\d[\d.]*\d|\d", sentences())
  allowed = ["2022", versions[0], versions[-1], "2.0"]  # of the licence
  assert sorted(numbers) == sorted(allowed)


def test_quickstart_has_the_regimes_that_are_counted():
  assert "four regimes" in text()
  assert len(quickstart.get_config().sweep.regime) == 4


def rows(output):
  """{name of the trial: (what is exact, test accuracy in %)}."""
  pattern = r"^(glyphs\S+) +(.*?) +[\d.]+ % +([\d.]+) % +([\d.]+) %"
  return {
    name: (exact.split() + [chance], float(accuracy))
    for name, exact, accuracy, chance in re.findall(pattern, output, re.M)
  }


@pytest.mark.slow
@pytest.mark.nightly
def test_quickstart_prints_the_recorded_table(tmp_path):
  """Within the points by which seeds and machines differ."""
  recorded = rows(RESULTS.read_text(encoding="utf-8"))
  assert len(recorded) == 4
  command = ["-m", "memory_vit", "train", "--config=quickstart"]
  done = subprocess.run(
    [sys.executable, *command, f"--workdir={tmp_path / 'run'}"],
    capture_output=True, text=True, cwd=ROOT, check=True,
  )  # fmt: skip
  printed = rows(done.stdout + done.stderr)
  for name, (exact, accuracy) in recorded.items():
    assert printed[name][0] == exact
    assert abs(printed[name][1] - accuracy) <= 3, name
  assert "original outputs unchanged (bitwise): yes" in done.stdout

"""The page docs/dev/reliability.md lists faults with their tests."""

import ast

import pytest
from conftest import ROOT

from docs.reliability import faults, markers
from docs.reliability.page import render

IDS = [fault.id for part in faults.read().parts for fault in part.faults]


def marked(*ids):
  return (
    f"@pytest.mark.fault({', '.join(map(repr, ids))})\ndef test_it(): ...\n"
  )


@pytest.fixture
def rendered(tmp_path):
  """Render the page from tests with this source."""

  def render_from(source):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "test_it.py").write_text(source)
    return render({tmp_path: ""})

  return render_from


def test_page_is_up_to_date():
  page = (ROOT / "docs/dev/reliability.md").read_text(encoding="utf-8")
  assert page == render(), "run python -m docs.reliability"


def test_each_fault_has_a_row_with_its_tests(rendered):
  page = rendered(marked(*IDS))
  assert page.count("| `part/test_it.py::test_it` |") == len(IDS)
  assert f"list {len(IDS)} faults" in page


def test_each_fault_has_a_test_outside_make_nightly():
  """One that is not in `make nightly` alone."""
  folder = ROOT / "tests"
  nightly = {
    f"{path.relative_to(folder).as_posix()}::{node.name}"
    for path in folder.rglob("test_*.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
    and "pytest.mark.nightly" in map(ast.unparse, node.decorator_list)
  }
  assert nightly
  found = markers.tests_by_fault(folder)
  assert [fault for fault in found if nightly.issuperset(found[fault])] == []


@pytest.mark.parametrize(("source", "words"), [
  (marked(*IDS[1:]), f"no test has .*: {IDS[0]}$"),
  (marked("earthquake", *IDS), "earthquake .part/test_it.py::test_it"),
  *((source, "test_it.py, line .* expected") for source in (
    "pytestmark = pytest.mark.fault('sigterm')",
    "@pytest.mark.fault\ndef test_it(): ...",
    "@pytest.mark.fault()\ndef test_it(): ...",
    "@pytest.mark.fault(*IDS)\ndef test_it(): ...",
    "@pytest.mark.fault(id='sigterm')\ndef test_it(): ...",
    "class TestIt:\n  @pytest.mark.fault('sigterm')\n  def test_it(self): ...",
  )),
], ids=range(8))  # fmt: skip
def test_faults_without_a_test_and_unusable_markers_are_errors(
  source, words, rendered
):
  with pytest.raises(ValueError, match=words):
    rendered(source)

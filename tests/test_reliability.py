"""The page docs/dev/reliability.md lists faults with their tests."""

import ast

import pytest
from conftest import ROOT

from docs.reliability import faults, markers
from docs.reliability.page import render


def marked(*ids):
  return (
    f"@pytest.mark.fault({', '.join(map(repr, ids))})\ndef test_it(): ...\n"
  )


@pytest.fixture
def ids():
  return [fault.id for part in faults.read().parts for fault in part.faults]


@pytest.fixture
def rendered(tmp_path):
  """Render the page from tests with this source."""

  def render_from(source):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "test_it.py").write_text(source)
    return render(tmp_path)

  return render_from


def test_the_page_is_what_is_written_now():
  page = (ROOT / "docs/dev/reliability.md").read_text(encoding="utf-8")
  assert page == render(), "run python -m docs.reliability"


def test_each_fault_has_a_row_with_its_tests(ids, rendered):
  page = rendered(marked(*ids))
  assert page.count("| `part/test_it.py::test_it` |") == len(ids)
  assert f"list {len(ids)} faults" in page


def test_a_fault_without_a_test_is_an_error(ids, rendered):
  with pytest.raises(ValueError, match=f"no test has .*: {ids[0]}$"):
    rendered(marked(*ids[1:]))


def test_each_fault_has_a_test_before_a_change_lands():
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


def test_a_marker_of_an_unknown_fault_is_an_error(ids, rendered):
  with pytest.raises(ValueError, match="earthquake .part/test_it.py::test_it"):
    rendered(marked("earthquake", *ids))


@pytest.mark.parametrize("source", [
  "pytestmark = pytest.mark.fault('sigterm')",
  "@pytest.mark.fault\ndef test_it(): ...",
  "@pytest.mark.fault()\ndef test_it(): ...",
  "@pytest.mark.fault(*IDS)\ndef test_it(): ...",
  "@pytest.mark.fault(id='sigterm')\ndef test_it(): ...",
  "class TestIt:\n  @pytest.mark.fault('sigterm')\n  def test_it(self): ...",
])  # fmt: skip
def test_a_marker_that_cannot_be_read_is_an_error(source, rendered):
  with pytest.raises(ValueError, match="test_it.py, line .* expected"):
    rendered(source)

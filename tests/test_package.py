"""What can be said of the package from outside."""

import json
import os
import re
import subprocess
import sys

from conftest import ROOT

import memory_vit as mv

HEAVY = ("tensorflow", "tensorflow_datasets", "clu", "ml_collections", "orbax",
         "pooch", "matplotlib", "sklearn")  # fmt: skip


def test_the_core_imports_nothing_heavy():
  code = (
    "import sys, json, memory_vit; from memory_vit import step; "
    f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True,
    cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""},
  )  # fmt: skip
  assert json.loads(done.stdout.splitlines()[-1]) == []


def test_tensorflow_is_imported_for_data_alone():
  files = {
    path.name
    for path in (ROOT / "memory_vit").glob("*.py")
    if re.search(r"^\s*(import|from) tensorflow", path.read_text(), re.M)
  }
  assert files == {
    "image_ops.py", "tfrecords.py", "sources.py", "tfds_source.py",
    "tfds_trust.py", "batching.py", "data.py", "checking.py", "pictures.py",
  }  # fmt: skip


def test_imports_go_downward_only():
  """The table in the README is the order, bottom to top."""
  table = re.findall(r"^\| `(\w+)\.py`", (ROOT / "README.md").read_text(), re.M)
  modules = {p.stem for p in (ROOT / "memory_vit").glob("*.py")} - {"__init__"}
  assert set(table) == modules
  for i, name in enumerate(table):
    text = (ROOT / "memory_vit" / f"{name}.py").read_text()
    imported = set(re.findall(r"^\s*from memory_vit\.(\w+) import", text, re.M))
    block = re.findall(
      r"^\s*from memory_vit import (\([^)]*\)|[^\n(]+)", text, re.M
    )
    imported |= set(re.findall(r"\w+", " ".join(re.sub(r" as \w+", "", b)
                                               for b in block)))  # fmt: skip
    above = imported - set(table[:i])
    assert not above, f"{name}.py imports {above} from above"


def test_public_names():
  for name in mv.__all__:
    assert getattr(mv, name).__doc__, name


def test_every_fault_has_tests_that_are_there():
  """In the table of docs/reliability.md, by file.py::function."""
  text = (ROOT / "docs" / "reliability.md").read_text()
  assert not re.findall(r"@\w+@", text)  # nothing is left to be filled in
  rows = re.findall(r"^\| (\d+) \|(.*)$", text, re.M)
  assert [int(number) for number, _ in rows] == list(range(1, 74))
  for number, row in rows:
    assert "`test_" in row, f"fault {number} has no test"
  for name in re.findall(r"`(test_[^`]*)`", text):
    file, _, function = name.partition("::")
    path = ROOT / "tests" / file
    assert path.is_file(), name
    if function:
      assert f"\ndef {function}(" in path.read_text(), name
  # None is named in another way, which would not be checked.
  assert len(re.findall(r"::", text)) == len(
    re.findall(r"`test_\w+\.py::", text)
  )

"""A kind of task is an object: nothing outside of `kinds/` knows it by name."""

import ast

import pytest
from conftest import ROOT

from memory_vit.kinds import KINDS

NAMES = {*KINDS}
OBJECTS = {
  "ClassEvaluation", "LabelEvaluation", "ValueEvaluation",
  "SplitPredictions", "LabelPredictions", "ValuePredictions",
  "Classes", "Labels", "Values",
}  # fmt: skip
# {a line of the package: why it may decide by a kind, or does not}
ALLOWED = {
  "data/audit.py: return {": "keys of a JSON report: numbers of classes",
  "train/run_pictures.py: if not isinstance(predictions, SplitPredictions):":
  "only classes have a confusion matrix, a plot that is above kinds/",
}  # fmt: skip


def is_name(node):
  if isinstance(node, ast.Tuple | ast.List | ast.Set):
    return any(map(is_name, node.elts))
  return isinstance(node, ast.Constant) and node.value in NAMES


def names_in(node):
  parts = ast.walk(node)
  return {getattr(n, "id", getattr(n, "attr", None)) for n in parts}


def decides(node):
  """Whether a node of a syntax tree decides by a kind of task."""
  if isinstance(node, ast.Compare):
    return any(map(is_name, (node.left, *node.comparators)))
  if isinstance(node, ast.Dict):
    return sum(map(is_name, filter(None, node.keys))) > 1
  if isinstance(node, ast.MatchValue):
    return is_name(node.value)
  is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
  if is_call and node.func.id in ("isinstance", "issubclass"):
    return bool(names_in(node.args[1]) & OBJECTS)
  return False


def decisions(source):
  lines = source.splitlines()
  return {
    lines[getattr(node, "lineno", getattr(node, "value", node).lineno) - 1]
    .strip()
    for node in ast.walk(ast.parse(source))
    if decides(node)
  }  # fmt: skip


def test_only_the_kinds_package_decides_by_kind():
  package = ROOT / "memory_vit"
  found = {
    f"{file.relative_to(package)}: {line}"
    for file in package.rglob("*.py")
    if "kinds" not in file.relative_to(package).parts
    for line in decisions(file.read_text(encoding="utf-8"))
  }
  assert found == ALLOWED.keys()
  assert len(ALLOWED) <= 10


@pytest.mark.parametrize(
  "line",
  [
    'x = kind == "classes"', 'x = kind in ("labels", "values")',
    'x = {"classes": 1, "labels": 2}', "isinstance(x, ValuePredictions)",
    'match kind:\n  case "values":\n    pass',
  ],
)  # fmt: skip
def test_decisions_by_kind_are_detected(line):
  assert decisions(line)

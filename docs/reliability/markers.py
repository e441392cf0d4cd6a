"""Find the tests of each fault by their markers, in the source of the tests.

No test is imported: the files are parsed, so arguments have to be literal.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

_MARKER = "pytest.mark.fault"


def tests_by_fault(folder: Path) -> dict[str, list[str]]:
  """Find the tests of each fault.

  Args:
    folder: the tests, searched at any depth.

  Returns:
    For each fault that a marker names, its tests as `file.py::function`, the
    file relative to `folder`: in the order of files and lines.

  Raises:
    ValueError: if a marker stands elsewhere than on a test of a module, or its
      arguments are not literal strings.
  """
  found: dict[str, list[str]] = {}
  for path in sorted(folder.rglob("test_*.py")):
    source = path.read_text(encoding="utf-8")
    if _MARKER not in source:
      continue
    for test, fault in _marked(ast.parse(source), path):
      name = f"{path.relative_to(folder).as_posix()}::{test}"
      found.setdefault(fault, []).append(name)
  return found


def _marked(module: ast.Module, path: Path) -> Iterator[tuple[str, str]]:
  """Pairs of a test and a fault that its marker names."""
  others = {
    id(node): node
    for node in ast.walk(module)
    if isinstance(node, ast.Attribute) and ast.unparse(node) == _MARKER
  }
  for function in module.body:
    if not isinstance(function, ast.FunctionDef):
      continue
    for call in function.decorator_list:
      if isinstance(call, ast.Call) and others.pop(id(call.func), None):
        for fault in _faults(call, path):
          yield function.name, fault
  for node in others.values():
    raise ValueError(
      f"{path}, line {node.lineno}: {_MARKER} is expected as a decorator, "
      "called with ids of faults, of a test that is a function of its module"
    )


def _faults(call: ast.Call, path: Path) -> list[str]:
  """The ids that one marker names."""
  ids = [
    one.value
    for one in call.args
    if isinstance(one, ast.Constant) and isinstance(one.value, str)
  ]
  if not ids or len(ids) != len(call.args) + len(call.keywords):
    raise ValueError(
      f"{path}, line {call.lineno}: expected ids of faults as literal strings, "
      f"found {ast.unparse(call)}"
    )
  return ids

"""Each fault of `make mutants` can be made in the present code."""

import ast
import collections
import functools
import importlib.util
import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent


def _runner():
  """The script; a class of it must be able to find its module."""
  file = TESTS / "mutants" / "run.py"
  spec = importlib.util.spec_from_file_location("run_mutants", file)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


run = _runner()
MUTANTS = run.read_mutants()


def test_mutants_are_enough_and_have_unique_names():
  assert len(MUTANTS) >= 70
  names = collections.Counter(mutant.name for mutant in MUTANTS)
  assert [name for name, count in names.items() if count > 1] == []


def test_each_mutant_is_found_once_and_compiles():
  for mutant in MUTANTS:
    text = (run.ROOT / mutant.file).read_text(encoding="utf-8")
    # What it warns of here is an error where the tests import it.
    compile(mutant.applied_to(text), mutant.name, "exec")
    find, replace = map(ast.parse, (mutant.find, mutant.replace))
    assert ast.dump(find) != ast.dump(replace), mutant.name


def test_tests_named_by_mutants_exist():
  @functools.cache
  def functions(file):
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}

  for mutant in MUTANTS:
    assert mutant.tests, mutant.name
    for test in mutant.tests:
      file, _, function = test.partition("::")
      name = function.split("[")[0]
      assert not name or name in functions(file), (mutant.name, test)


FAULT = run.Mutant(
  name="a",
  fault="it does not add",
  function="package.module:Class.function",
  find="x + f(y)",
  replace="x",
  tests=(),
)
CODE = """
class Class:
  def function(self, x):
    g(x)
    return [x +
            f( y)]  # a comment
  def other(self, x):
    return x + f(y)
"""


def test_code_is_found_in_any_formatting():
  assert "g(x)\n        return [x]\n" in FAULT.applied_to(CODE)
  assert "return x + f(y)" in FAULT.applied_to(CODE)


def test_statements_are_replaced_or_removed():
  gone = run.dataclasses.replace(FAULT, find="g(x)", replace="")
  assert "g(x)" not in gone.applied_to(CODE)
  two = run.dataclasses.replace(
    FAULT, find="g(x)\nreturn [x + f(y)]", replace="return 1"
  )
  assert "x):\n        return 1\n" in two.applied_to(CODE)


@pytest.mark.parametrize("found", [0, 2])
def test_code_not_found_exactly_once_is_refused(found):
  code = CODE.replace("x +\n            f( y)", ", ".join(["x + f(y)"] * found))
  with pytest.raises(ValueError, match=f"{found} places .* expected 1. Write"):
    FAULT.applied_to(code)

"""The faults of `make mutants` are such: each is in the code as it is now."""

import ast
import collections
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


def test_there_are_enough_of_them_under_names_of_their_own():
  assert len(MUTANTS) >= 150
  names = collections.Counter(mutant.name for mutant in MUTANTS)
  assert [name for name, count in names.items() if count > 1] == []


def test_each_is_one_place_in_the_code_and_still_python():
  for mutant in MUTANTS:
    text = (run.ROOT / mutant.file).read_text(encoding="utf-8")
    # What it warns of here is an error where the tests import it.
    compile(mutant.applied_to(text), mutant.name, "exec")
    assert mutant.find != mutant.replace, mutant.name


def test_the_tests_that_should_notice_are_there():
  functions = {
    str(path.relative_to(TESTS)): {
      node.name
      for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
      if isinstance(node, ast.FunctionDef)
    }
    for path in TESTS.rglob("test_*.py")
  }
  for mutant in MUTANTS:
    assert mutant.tests, mutant.name
    for test in mutant.tests:
      file, _, function = test.partition("::")
      assert file in functions, mutant.name
      name = function.split("[")[0]
      assert not name or name in functions[file], (mutant.name, test)


def test_a_place_that_is_not_there_once_is_refused():
  mutant = MUTANTS[0]
  for text in ("", mutant.find * 2):
    with pytest.raises(ValueError, match="expected 1. Write the mutant anew"):
      mutant.applied_to(text)

"""Breaks the code in one place at a time, and runs the tests for that place.

  make mutants
  .venv/bin/python tests/mutants/run.py [--jobs N] [NAME ...]

A mutant is one small fault: in a function of the package, the expression or
the statements of `find` (which stand there once, however they are formatted)
become those of `replace`. It is killed where one of its `tests` fails, and has
survived where all pass. NAME is a mutant's name, or the beginning of some. The
exit status is 0 where all are killed.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# A mutant that hangs is killed as well.
LIMIT_SECONDS = 300
# What pytest exits with where all passed, and where it found no such test.
_PASSED, _NOT_FOUND = 0, (4, 5)
# Everything heavy but the package itself, which is another one in each mutant.
_PRELOADED = [
  "absl.logging", "clu.parameter_overview", "flax.linen", "jax",
  "ml_collections", "optax", "orbax.checkpoint", "PIL.Image", "pytest",
  "scipy.ndimage", "sklearn.datasets", "tensorflow", "tensorflow_datasets",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
  """One small fault.

  Attributes:
    name: unique; begins with the name of the list that it is in.
    fault: what is wrong then, in words.
    function: "package.module:Class.function".
    find: an expression, or statements, that the function holds exactly once.
    replace: what it becomes; "" where the statements go.
    tests: files or functions below tests/, one of which should fail.
  """

  name: str
  fault: str
  function: str
  find: str
  replace: str
  tests: tuple[str, ...]

  @property
  def file(self) -> pathlib.Path:
    """Below the root of the repository."""
    return pathlib.Path(*self.function.split(":")[0].split(".")).with_suffix(
      ".py"
    )

  def applied_to(self, text: str) -> str:
    """The source of the module with the fault in it.

    Raises:
      ValueError: where the function has not exactly one such place.
    """
    module = ast.parse(text)
    qualified_name = self.function.split(":")[1]
    functions = [
      node for name, node in _functions(module) if name == qualified_name
    ]
    find, replace = _parsed(self.find), _parsed(self.replace)
    if len(find) == len(replace) == 1 and all(
      isinstance(node, ast.Expr) for node in (*find, *replace)
    ):
      find, replace = [find[0].value], [replace[0].value]
    places = [p for node in functions for p in _places(node, find)]
    if len(places) != 1:
      raise ValueError(
        f"{self.name}: {self.function} has {len(places)} places with "
        f"{self.find!r}, expected 1. Write the mutant anew for what the code "
        "is now."
      )
    node, field, i = places[0]
    value = getattr(node, field)
    if isinstance(value, list):
      value[i : i + len(find)] = replace
      if field == "body" and not value:
        value.append(ast.Pass())
    else:
      setattr(node, field, replace[0])
    return ast.unparse(ast.fix_missing_locations(module))


def _parsed(text: str) -> list[Any]:
  return ast.parse(text).body


def _functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, Any]]:
  """All functions below a node, with their qualified names."""
  for child in ast.iter_child_nodes(node):
    name = within
    if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
      name = f"{within}.{child.name}".lstrip(".")
      if not isinstance(child, ast.ClassDef):
        yield name, child
    yield from _functions(child, name)


def _places(
  function: ast.AST, find: Sequence[ast.AST]
) -> Iterator[tuple[ast.AST, str, int]]:
  """Where a sequence of nodes stands: its parent, the field, from where."""
  wanted = [ast.dump(node) for node in find]
  for node in ast.walk(function):
    for field, value in ast.iter_fields(node):
      values = value if isinstance(value, list) else [value]
      dumps = [ast.dump(v) if isinstance(v, ast.AST) else "" for v in values]
      for i in range(len(dumps) - len(wanted) + 1):
        if dumps[i : i + len(wanted)] == wanted:
          yield node, field, i


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """What the tests said of a mutant.

  Attributes:
    mutant: of the list.
    status: of pytest; None where the time was over.
    noticed_by: the first test that failed, or what else happened.
    seconds: that the tests took.
  """

  mutant: Mutant
  status: int | None
  noticed_by: str
  seconds: float

  @property
  def killed(self) -> bool:
    """Whether a test failed, the process died or the time was over."""
    return self.status != _PASSED


def read_mutants() -> list[Mutant]:
  """All mutants; a list for every kind of promise."""
  mutants = []
  for path in sorted(HERE.glob("*.toml")):
    for one in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
      name, tests = f"{path.stem}-{one['name']}", tuple(one["tests"])
      mutants.append(Mutant(**{**one, "name": name, "tests": tests}))
  return mutants


class Copy:
  """A copy of the repository in which one mutant at a time is tried."""

  def __init__(self, directory: pathlib.Path) -> None:
    """Copies the working tree, but for what git ignores."""
    self._root = directory
    listed = subprocess.run(
      ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
      cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
      if (ROOT / name).is_file():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, directory / name)
    # What XLA has compiled before is the same in most mutants.
    cache = ROOT / ".pytest_cache"
    cache.mkdir(exist_ok=True)
    (directory / ".pytest_cache").symlink_to(cache)

  def try_one(self, mutant: Mutant) -> Outcome:
    """Runs the tests of a mutant."""
    file = self._root / mutant.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(mutant.applied_to(whole), encoding="utf-8")
    try:
      return self.run(mutant)
    finally:
      file.write_text(whole, encoding="utf-8")

  def run(self, mutant: Mutant, limit: int | None = LIMIT_SECONDS) -> Outcome:
    """Runs the tests of a mutant on the copy as it is."""
    log = self._root / "mutant.log"
    began = time.perf_counter()
    process = multiprocessing.get_context("forkserver").Process(
      target=_run_tests, args=(str(self._root), mutant.tests, str(log))
    )
    process.start()
    process.join(limit)
    status = process.exitcode
    if status is None:
      process.kill()
      process.join()
    text = log.read_text(encoding="utf-8", errors="replace")
    if status in _NOT_FOUND:
      raise ValueError(f"{mutant.name}: {mutant.tests} are no tests:\n{text}")
    return Outcome(
      mutant=mutant,
      status=status,
      noticed_by=_noticed_by(status, text),
      seconds=round(time.perf_counter() - began, 1),
    )


def _run_tests(root: str, tests: Sequence[str], log: str) -> None:
  """Is all that a process does which was forked for one mutant."""
  os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
  os.dup2(1, 2)
  os.chdir(root)
  # Files change more often than the clock by which bytecode is found valid.
  sys.dont_write_bytecode = True
  sys.path[:0] = [root, f"{root}/tests"]
  import pytest

  options = ["-x", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider"]
  named = [f"tests/{test}" for test in tests]
  status = pytest.main([*options, *named], plugins=[_Selection(named)])
  sys.stdout.flush()
  sys.stderr.flush()
  # What a mutant leaves open must not keep the process.
  os._exit(int(status))


class _Selection:
  """Leaves out slow tests of whole files; those that are named are run."""

  def __init__(self, named: Sequence[str]) -> None:
    self._named = tuple(name for name in named if "::" in name)

  def pytest_collection_modifyitems(self, items: list[Any]) -> None:
    """Is called by pytest."""
    items[:] = [
      item
      for item in items
      if item.nodeid.startswith(self._named)
      or not {"slow", "processes"} & {mark.name for mark in item.iter_markers()}
    ]


def _noticed_by(status: int | None, text: str) -> str:
  """The test that failed, from what pytest printed last."""
  if status is None:
    return f"the tests took more than {LIMIT_SECONDS} s"
  for line in text.splitlines():
    if line.startswith(("FAILED ", "ERROR ")):
      return line.split(" ", 1)[1].split(" - ")[0].removeprefix("tests/")
  if status == _PASSED:
    return ""
  last = next(reversed(text.strip().splitlines()), "")
  return f"the process ended with {status}: {last[:150]}"


def _require_passing(copies: Sequence[Copy], mutants: Sequence[Mutant]) -> None:
  """Exits unless all tests pass on the code as it is."""
  tests = sorted({test for mutant in mutants for test in mutant.tests})
  # A function is left out where its whole file is there.
  tests = [t for t in tests if "::" not in t or t.split("::")[0] not in tests]
  parts = [tests[i :: len(copies)] for i in range(len(copies))]
  whole = [
    dataclasses.replace(mutants[0], name="none", tests=tuple(part))
    for part in parts
    if part
  ]
  with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
    for outcome in pool.map(Copy.run, copies, whole, [None] * len(whole)):
      if outcome.killed:
        sys.exit(
          f"without a fault the tests fail as well: {outcome.noticed_by}"
        )


def main() -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("names", nargs="*", metavar="NAME")
  parser.add_argument("--jobs", type=int, default=os.cpu_count())
  arguments = parser.parse_args()
  mutants = [
    mutant
    for mutant in read_mutants()
    if not arguments.names or mutant.name.startswith(tuple(arguments.names))
  ]
  if not mutants:
    parser.error(f"there is no mutant {arguments.names}")
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
  multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
  with tempfile.TemporaryDirectory() as scratch:
    copies = [
      Copy(pathlib.Path(scratch, str(i))) for i in range(arguments.jobs)
    ]
    _require_passing(copies, mutants)
    outcomes = _try_all(copies, mutants)
  survived = [outcome.mutant for outcome in outcomes if not outcome.killed]
  print(f"\n{len(outcomes)} mutants: {len(survived)} survived")
  for mutant in survived:
    print(f"  {mutant.name}: {mutant.fault}")
  return 1 if survived else 0


def _try_all(
  copies: Sequence[Copy], mutants: Sequence[Mutant]
) -> list[Outcome]:
  """Tries every mutant, each copy one at a time; shows them as they end."""
  free = list(copies)

  def try_one(mutant: Mutant) -> Outcome:
    copy = free.pop()
    try:
      outcome = copy.try_one(mutant)
    finally:
      free.append(copy)
    print(
      f"{'killed' if outcome.killed else 'SURVIVED'} {mutant.name:45} "
      f"{outcome.seconds:6.1f} s  {outcome.noticed_by}",
      flush=True,
    )
    return outcome

  with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
    return list(pool.map(try_one, mutants))


if __name__ == "__main__":
  sys.exit(main())

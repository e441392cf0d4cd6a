"""Breaks the code in one place at a time, and runs the tests for that place.

  make mutants
  .venv/bin/python tests/mutants/run.py [--jobs N] [--json FILE] [NAME ...]

A mutant is one small fault: in a file of the package, `find` (which is there
once) becomes `replace`. It is killed where one of its `tests` fails, and has
survived where all pass. Those that change nothing that anybody could notice
say so in `equivalent`, with the reason, and must survive. NAME is a mutant's
name, or the beginning of some. The exit status is 0 where everything is as it
should be.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# A mutant that hangs is killed as well.
LIMIT_SECONDS = 300
# What pytest exits with where all passed, and where it found no such test.
_PASSED, _NOT_FOUND = 0, (4, 5)
# Everything heavy but the package itself, which is another one in each mutant.
_PRELOADED = [
  "absl.logging", "clu.metric_writers", "flax.linen", "jax", "ml_collections",
  "optax", "orbax.checkpoint", "PIL.Image", "pytest", "scipy.ndimage",
  "sklearn.datasets", "tensorflow", "tensorflow_datasets",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
  """One small fault.

  Attributes:
    name: unique; begins with the name of the list that it is in.
    fault: what is wrong then, in words.
    file: below the root of the repository.
    find: text that the file holds exactly once.
    replace: what it becomes.
    tests: files or functions below tests/, one of which should fail.
    equivalent: why no test can notice it; "" for all others.
  """

  name: str
  fault: str
  file: str
  find: str
  replace: str
  tests: tuple[str, ...]
  equivalent: str = ""

  def applied_to(self, text: str) -> str:
    """The content of the file with the fault in it.

    Raises:
      ValueError: where the file has not exactly one such place.
    """
    if text.count(self.find) != 1:
      raise ValueError(
        f"{self.name}: {self.file} has {text.count(self.find)} places with "
        f"{self.find!r}, expected 1. Write the mutant anew for what the code "
        "is now."
      )
    return text.replace(self.find, self.replace)


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

  @property
  def as_it_should_be(self) -> bool:
    """Whether it was noticed, unless nobody could."""
    return self.killed != bool(self.mutant.equivalent)


def read_mutants() -> list[Mutant]:
  """All mutants; a list for every module of the package."""
  mutants = []
  for path in sorted(HERE.glob("*.toml")):
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants += [
      Mutant(
        **{
          "file": values["file"],
          **one,
          "name": f"{path.stem}-{one['name']}",
          "tests": tuple(one["tests"]),
        }
      )
      for one in values["mutant"]
    ]
  return mutants


class Copy:
  """A copy of the repository in which one mutant at a time is tried."""

  def __init__(self, directory: pathlib.Path) -> None:
    """Copies all files that git knows, as they are in the working tree."""
    self._root = directory
    listed = subprocess.run(
      ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
    )
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

  def run(self, mutant: Mutant) -> Outcome:
    """Runs the tests of a mutant on the copy as it is."""
    log = self._root / "mutant.log"
    began = time.perf_counter()
    process = multiprocessing.get_context("forkserver").Process(
      target=_run_tests, args=(str(self._root), mutant.tests, str(log))
    )
    process.start()
    process.join(LIMIT_SECONDS)
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
  ]
  with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
    for outcome in pool.map(Copy.run, copies, whole):
      if outcome.mutant.tests and outcome.killed:
        sys.exit(
          f"without a fault the tests fail as well: {outcome.noticed_by}"
        )


def main() -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("names", nargs="*", metavar="NAME")
  parser.add_argument("--jobs", type=int, default=os.cpu_count())
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  parser.add_argument(
    "--unchecked", action="store_true",
    help="do not run the tests without a fault first",
  )  # fmt: skip
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
    if not arguments.unchecked:
      _require_passing(copies, mutants)
    outcomes = _try_all(copies, mutants)
  if arguments.json:
    values = [dataclasses.asdict(outcome) for outcome in outcomes]
    arguments.json.write_text(json.dumps(values, indent=2) + "\n")
  return _report(outcomes)


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
    _show(outcome)
    return outcome

  with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
    return list(pool.map(try_one, mutants))


def _show(outcome: Outcome) -> None:
  what = "killed" if outcome.killed else "survived"
  if outcome.mutant.equivalent:
    what = "killed, though equivalent" if outcome.killed else "equivalent"
  print(
    f"{what:10} {outcome.mutant.name:45} {outcome.seconds:6.1f} s  "
    f"{outcome.noticed_by}",
    flush=True,
  )


def _report(outcomes: Sequence[Outcome]) -> int:
  """Prints how many there are of each kind; returns the exit status."""
  wrong = [o for o in outcomes if not o.as_it_should_be]
  equivalent = [o for o in outcomes if o.mutant.equivalent]
  killed = [o for o in outcomes if o.killed]
  print(
    f"\n{len(outcomes)} mutants: {len(killed)} killed, {len(equivalent)} "
    f"equivalent, {len(wrong)} not as they should be"
  )
  for outcome in wrong:
    print(f"  {outcome.mutant.name}: {outcome.mutant.fault}")
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())

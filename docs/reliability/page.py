"""Render docs/dev/reliability.md: faults and their tests, as tables."""

from collections.abc import Mapping
from pathlib import Path

from docs.reliability import faults
from docs.reliability.faults import Fault, Part
from docs.reliability.markers import tests_by_fault
from memory_vit.runtime.tables import markdown_table

_ROOT = Path(__file__).resolve().parents[2]
# Folders of tests, with what precedes the names of their files on the page.
TESTS = {_ROOT / "tests": "", _ROOT / "studies" / "tests": "studies/tests/"}
_HEADER = ("fault", "what happens", "tests", "measured")


def render(folders: Mapping[Path, str] = TESTS) -> str:
  """The page in Markdown; ValueError if tests and faults.toml do not match."""
  texts = faults.read()
  tests: dict[str, list[str]] = {}
  for folder, prefix in folders.items():
    for fault, names in tests_by_fault(folder).items():
      tests.setdefault(fault, []).extend(prefix + name for name in names)
  ids = [fault.id for part in texts.parts for fault in part.faults]
  _check(ids, tests)
  tables = [_table(part, tests) for part in texts.parts]
  before = texts.before.replace("{count}", str(len(ids)))
  return "\n\n".join([before.strip(), *tables, texts.after.strip()]) + "\n"


def _check(ids: list[str], tests: dict[str, list[str]]) -> None:
  twice = sorted({one for one in ids if ids.count(one) > 1})
  if twice:
    raise ValueError(f"faults.toml has duplicate ids: {', '.join(twice)}")
  unknown = [
    f"{one} ({', '.join(names)})"
    for one, names in tests.items()
    if one not in ids
  ]
  if unknown:
    raise ValueError(
      f"markers name faults that are not in faults.toml: {'; '.join(unknown)}"
    )
  untested = [one for one in ids if one not in tests]
  if untested:
    raise ValueError(
      "no test has a marker pytest.mark.fault for these faults of "
      f"faults.toml: {', '.join(untested)}"
    )


def _table(part: Part, tests: dict[str, list[str]]) -> str:
  rows = [_row(fault, tests[fault.id]) for fault in part.faults]
  text = [part.text.strip()] if part.text else []
  return "\n\n".join(
    [f"### {part.title}", *text, markdown_table(_HEADER, rows)]
  )


def _row(fault: Fault, tests: list[str]) -> tuple[str, ...]:
  names = ", ".join(f"`{test}`" for test in tests)
  return fault.fault, fault.answer, names, fault.measured

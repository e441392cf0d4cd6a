"""Render docs/dev/reliability.md: faults and their tests, as tables."""

from pathlib import Path

from docs.reliability import faults
from docs.reliability.faults import Fault, Part
from docs.reliability.markers import tests_by_fault
from memory_vit.runtime.tables import markdown_table

TESTS = Path(__file__).resolve().parents[2] / "tests"
_HEADER = ("fault", "what happens", "tests", "measured")


def render(folder: Path = TESTS) -> str:
  """The page in Markdown; ValueError if tests and faults.toml do not match."""
  texts = faults.read()
  tests = tests_by_fault(folder)
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

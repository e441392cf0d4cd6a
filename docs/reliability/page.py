"""The page docs/dev/reliability.md: faults with their tests, as tables."""

from pathlib import Path

from docs.reliability import faults
from docs.reliability.faults import Fault, Part
from docs.reliability.markers import tests_by_fault
from memory_vit.runtime.tables import markdown_table

TESTS = Path(__file__).resolve().parents[2] / "tests"
_HEADER = ("fault", "what happens", "tests", "measured")


def render(folder: Path = TESTS) -> str:
  """Render the page.

  Args:
    folder: the tests, whose markers name the faults that they show.

  Returns:
    The page in Markdown.

  Raises:
    ValueError: if a fault has no test, two have one id, or a marker names a
      fault that faults.toml lacks.
  """
  texts = faults.read()
  tests = tests_by_fault(folder)
  ids = [fault.id for part in texts.parts for fault in part.faults]
  _check(ids, tests)
  tables = [_table(part, tests) for part in texts.parts]
  before = texts.before.replace("{count}", str(len(ids)))
  return "\n\n".join([before.strip(), *tables, texts.after.strip()]) + "\n"


def _check(ids: list[str], tests: dict[str, list[str]]) -> None:
  """Compare the faults of faults.toml with those that markers name."""
  twice = sorted({one for one in ids if ids.count(one) > 1})
  if twice:
    raise ValueError(f"faults.toml has these ids twice: {', '.join(twice)}")
  unknown = [
    f"{one} ({', '.join(names)})"
    for one, names in tests.items()
    if one not in ids
  ]
  if unknown:
    raise ValueError(
      f"markers name faults that faults.toml lacks: {'; '.join(unknown)}"
    )
  untested = [one for one in ids if one not in tests]
  if untested:
    raise ValueError(
      "no test has the marker pytest.mark.fault of these faults of "
      f"faults.toml: {', '.join(untested)}"
    )


def _table(part: Part, tests: dict[str, list[str]]) -> str:
  """A part of the page: its heading, its text and a row for each fault."""
  rows = [_row(fault, tests[fault.id]) for fault in part.faults]
  text = [part.text.strip()] if part.text else []
  return "\n\n".join(
    [f"### {part.title}", *text, markdown_table(_HEADER, rows)]
  )


def _row(fault: Fault, tests: list[str]) -> tuple[str, ...]:
  names = ", ".join(f"`{test}`" for test in tests)
  return fault.fault, fault.answer, names, fault.measured

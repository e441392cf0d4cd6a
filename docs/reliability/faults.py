"""Read faults.toml: what can go wrong, and what happens then."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
  """One thing that can go wrong.

  Attributes:
    id: what the marker `@pytest.mark.fault(id)` of its tests names.
    fault: what goes wrong.
    answer: what happens then.
    measured: numbers that the tests show, if any.
  """

  id: str
  fault: str
  answer: str
  measured: str = ""


@dataclass(frozen=True)
class Part:
  """Faults of one kind, which the page shows as one table."""

  title: str
  faults: tuple[Fault, ...]
  text: str = ""


@dataclass(frozen=True)
class Texts:
  """The prose of the page around its tables, and the tables' parts."""

  before: str
  parts: tuple[Part, ...]
  after: str


def read() -> Texts:
  """Read faults.toml; a key that is unknown or missing is an error."""
  path = Path(__file__).with_name("faults.toml")
  values = tomllib.loads(path.read_text(encoding="utf-8"))
  parts = tuple(
    Part(**part | {"faults": tuple(Fault(**one) for one in part["faults"])})
    for part in values.pop("parts")
  )
  return Texts(parts=parts, **values)

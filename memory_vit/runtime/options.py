"""Options: dataclass fields with a default and a rule for their values.

Upper bounds only exclude absurd values. A run checks whether the machine has
the resources for a value, before the run reads any data.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, Protocol

from memory_vit.errors import ConfigError
from memory_vit.runtime import messages, schema


class Rule(Protocol):
  """A test of values whose type has already been checked."""

  @property
  def expected(self) -> str:
    """The words after "expected" in a message and in --help."""

  def accepts(self, value: Any) -> bool:
    """Return whether the option may have this value."""


@dataclasses.dataclass(frozen=True)
class Number:
  """A range; `positive` excludes the bound `least`, `below` excludes `most`."""

  least: float
  most: float
  why: str
  positive: bool = False
  below: bool = False

  @property
  def expected(self) -> str:
    if self.positive:
      return f"a positive number up to {self.most:,.0f} ({self.why})"
    last = "less than" if self.below else "at most"
    return f"at least {self.least:,} and {last} {self.most:,.0f} ({self.why})"

  def accepts(self, value: Any) -> bool:
    # NaN is refused, because every comparison with it is false.
    above = value > self.least if self.positive else value >= self.least
    return above and (value < self.most if self.below else value <= self.most)


@dataclasses.dataclass(frozen=True)
class Choice:
  names: Collection[str]

  @property
  def expected(self) -> str:
    return f"one of {list(self.names)}"

  def accepts(self, value: Any) -> bool:
    return value in self.names


@dataclasses.dataclass(frozen=True)
class Text:
  """Text on one line, such as a name; `pattern` must match the whole text."""

  what: str
  pattern: str = ".+"
  most: int = 1_000

  @property
  def expected(self) -> str:
    return f"{self.what}, at most {self.most:,} characters that can be printed"

  def accepts(self, value: Any) -> bool:
    return (
      len(value) <= self.most
      and messages.escaped(value) == value
      and bool(re.fullmatch(self.pattern, value))
    )


@dataclasses.dataclass(frozen=True)
class Switch:
  expected: str = "true or false"

  def accepts(self, value: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Changes:
  """A mapping of options to new values; or text, if `name` accepts it."""

  expected: str
  name: Text | None = None

  def accepts(self, value: Any) -> bool:
    if isinstance(value, str):
      return self.name is not None and self.name.accepts(value)
    return isinstance(value, Mapping)


@dataclasses.dataclass(frozen=True)
class Items:
  rule: Rule
  most: int

  @property
  def expected(self) -> str:
    return f"at most {self.most:,} values, each {self.rule.expected}"

  def accepts(self, value: Any) -> bool:
    return len(value) <= self.most and all(map(self.rule.accepts, value))


# May a resumed run change an option? "recorded": yes, and the result lists the
# change. "free": yes, because no result depends on the option.
Resume = Literal["never", "recorded", "free"]


@dataclasses.dataclass(frozen=True)
class Option:
  """An option; its value may be None if the annotation allows it."""

  key: str
  owner: type
  annotation: Any
  default: Any
  rule: Rule
  about: str  # help text; for configs, the comment above the field
  metavar: str | None
  resume: Resume
  sweep: bool

  @property
  def kind(self) -> str:
    return schema.type_name(self.annotation)

  @property
  def expected(self) -> str:
    return f"{self.kind}: {self.rule.expected}"


def option(
  default: Any,
  rule: Rule,
  about: str = "",
  *,
  metavar: str | None = None,
  resume: Resume = "never",
  sweep: bool = False,
) -> Any:
  metadata = {
    "rule": rule, "about": about, "metavar": metavar, "resume": resume,
    "sweep": sweep,
  }  # fmt: skip
  return dataclasses.field(default=default, metadata=metadata)


def table(cls: type, prefix: str = "") -> dict[str, Option]:
  """Return {key: option} for a dataclass and all dataclasses in its fields."""
  rows: dict[str, Option] = {}
  for field in dataclasses.fields(cls):
    key = f"{prefix}{field.name}"
    if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
      rows |= table(field.type, f"{key}.")
    elif "rule" in field.metadata:
      rows[key] = Option(key, cls, field.type, field.default, **field.metadata)
    else:
      raise TypeError(
        f"{cls.__name__}.{field.name} declares no rules: expected a field made "
        "by `options.option`."
      )
  return rows


def require(values: Any, prefix: str = "") -> None:
  """Raise `ConfigError` for the first value that its type or rule refuses."""
  for field in dataclasses.fields(values):
    name, value = f"{prefix}{field.name}", getattr(values, field.name)
    if dataclasses.is_dataclass(value):
      require(value, f"{name}.")
    else:
      _require(name, value, field.type, field.metadata["rule"])


def checked(name: str, value: Any, option: Option) -> Any:
  """Return a value with lists as tuples; raise `ConfigError` if invalid."""
  _require(name, value, option.annotation, option.rule)
  return schema.typed(option.annotation, value, name, ConfigError)


def _require(name: str, value: Any, kind: Any, rule: Rule) -> None:
  if (
    isinstance(rule, Items)
    and isinstance(value, list | tuple)
    and len(value) <= rule.most
  ):
    item_type, *_ = typing.get_args(kind)
    for i, item in enumerate(value):
      _require(f"{name}[{i}]", item, item_type, rule.rule)
  elif not schema.fits(kind, value):
    expected = f"{schema.type_name(kind)}: {rule.expected}"
    raise ConfigError(messages.refusal(name, value, expected))
  elif value is not None and not rule.accepts(value):
    raise ConfigError(messages.refusal(name, value, rule.expected))


def unknown(
  where: str, key: str, known: Iterable[str], prefix: str = ""
) -> str:
  """Return an error text for an unknown key, with the three nearest keys."""

  def likeness(name: str) -> float:
    whole = difflib.SequenceMatcher(None, key, name).ratio()
    ends = key.rpartition(".")[2], name.rpartition(".")[2]
    return max(whole, difflib.SequenceMatcher(None, *ends).ratio())

  near = sorted(known, key=likeness, reverse=True)[:3]
  listed = ", ".join(f"{prefix}{name}" for name in near)
  return f"{where} has no option {messages.brief(key)}; nearest: {listed}."

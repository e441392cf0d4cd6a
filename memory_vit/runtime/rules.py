"""Rules for the values of options and flags, with the words for a refusal.

Upper bounds exclude what nobody can mean. What the machine has is checked by a
run, before it reads anything.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Protocol

from memory_vit.runtime import messages


class Rule(Protocol):
  """A test of the values, of the right type, that an option may have."""

  @property
  def expected(self) -> str:
    """The words after "expected" in a message and in --help."""

  def accepts(self, value: Any) -> bool:
    """Whether the option may have this value."""


@dataclasses.dataclass(frozen=True)
class Number:
  """A number between two bounds.

  Attributes:
    least: the lower bound, itself accepted.
    most: the upper bound, itself accepted.
    why: the reason for the bounds, or what the number counts.
    positive: whether `least`, 0, is refused itself.
    below: whether `most` is refused itself.
  """

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
    # Of NaN every comparison is false.
    above = value > self.least if self.positive else value >= self.least
    return above and (value < self.most if self.below else value <= self.most)


@dataclasses.dataclass(frozen=True)
class Choice:
  """One of several names."""

  names: tuple[str, ...]

  @property
  def expected(self) -> str:
    return f"one of {list(self.names)}"

  def accepts(self, value: Any) -> bool:
    return value in self.names


@dataclasses.dataclass(frozen=True)
class Text:
  """Text on one line, such as a name, a path or an address.

  Attributes:
    what: what the text stands for, in words.
    pattern: a regular expression for the whole text.
    most: the greatest number of characters.
  """

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
  """True or false."""

  expected: str = "true or false"

  def accepts(self, value: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Changes:
  """Options with new values; whoever applies them checks each.

  Attributes:
    expected: see `Rule`.
    name: what may stand there instead, as a string; None for nothing.
  """

  expected: str
  name: Text | None = None

  def accepts(self, value: Any) -> bool:
    if isinstance(value, str):
      return self.name is not None and self.name.accepts(value)
    return isinstance(value, Mapping)


@dataclasses.dataclass(frozen=True)
class Items:
  """Up to `most` values, each of which `rule` accepts."""

  rule: Rule
  most: int

  @property
  def expected(self) -> str:
    return f"at most {self.most:,} values, each {self.rule.expected}"

  def accepts(self, value: Any) -> bool:
    return len(value) <= self.most and all(map(self.rule.accepts, value))

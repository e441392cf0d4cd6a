"""Values of an untrusted config.json, checked one by one."""

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief

_T = TypeVar("_T")
# Methods of `Fields` have the names of these types.
_Int: TypeAlias = int
_Float: TypeAlias = float


class Fields:
  """The fields of a JSON object from a stranger.

  A field that is null counts as absent: that is how transformers writes None.
  Every method raises `BackboneError`, which names the file, the key, the value
  and what was expected; for an absent field where no default is given, too.
  """

  def __init__(self, config: Any, where: str) -> None:
    """Wrap a parsed object; `where` names its file, and the key inside it."""
    if not isinstance(config, Mapping):
      raise BackboneError(f"{where} is {brief(config)}, expected an object.")
    self._config = config
    self.where = where

  def has(self, name: str) -> bool:
    """Whether there is such a field, other than null."""
    return self._config.get(name) is not None

  def int(
    self, name: str, low: _Int, high: _Int, default: _Int | None = None
  ) -> _Int:
    """A whole number from `low` to `high`."""
    value = self._get(name, default, f"a whole number, {low} to {high:,}")
    if type(value) is not _Int or not low <= value <= high:
      raise self._refusal(name, f"a whole number, {low} to {high:,}")
    return value

  def float(
    self, name: str, low: _Float, high: _Float, default: _Float | None = None
  ) -> _Float:
    """A number from `low` to `high`."""
    expected = f"a number, {low:g} to {high:g}"
    value = self._get(name, default, expected)
    if type(value) not in (_Int, _Float) or not low <= value <= high:
      raise self._refusal(name, expected)
    return _Float(value)

  def optional_float(
    self, name: str, low: _Float, high: _Float
  ) -> _Float | None:
    """A number from `low` to `high`, or None where it is absent."""
    return self.float(name, low, high) if self.has(name) else None

  def choice(
    self, name: str, choices: Mapping[str, _T], default: str | None = None
  ) -> _T:
    """The value in `choices` of a string; `default` is one of its keys."""
    expected = f"one of {', '.join(map(repr, choices))}"
    value = self._get(name, default, expected)
    if type(value) is not str or value not in choices:
      raise self._refusal(name, expected)
    return choices[value]

  def flag(self, name: str, default: bool | None = None) -> bool:
    """True or false."""
    value = self._get(name, default, "true or false")
    if type(value) is not bool:
      raise self._refusal(name, "true or false")
    return value

  def text(self, name: str, default: str | None = None) -> str:
    """A string of at most 200 characters."""
    expected = "a string of at most 200 characters"
    value = self._get(name, default, expected)
    if type(value) is not str or len(value) > 200:
      raise self._refusal(name, expected)
    return value

  def size(
    self, name: str, low: _Int, high: _Int, default: _Int | None = None
  ) -> _Int:
    """The side of a square.

    It is written as a whole number, as [h, w] or as {"height": h, "width": w},
    with h = w.
    """
    expected = (
      f"the side of a square, {low} to {high:,}: a number, or [h, w] or "
      '{"height": h, "width": w} with h = w'
    )
    value = self._get(name, default, expected)
    if isinstance(value, Mapping) and value.keys() == {"height", "width"}:
      value = [value["height"], value["width"]]
    sides = value if isinstance(value, list) else [value, value]
    fits = all(type(side) is _Int and low <= side <= high for side in sides)
    if not fits or len(sides) != 2 or sides[0] != sides[1]:
      raise self._refusal(name, expected)
    return sides[0]

  def numbers(
    self, name: str, count: _Int, low: _Float = -1e30, high: _Float = 1e30
  ) -> tuple[_Float, ...]:
    """A list of `count` numbers from `low` to `high`."""
    expected = f"a list of {count} numbers, {low:g} to {high:g}"
    value = self._get(name, None, expected)
    if not isinstance(value, list | tuple) or len(value) != count:
      raise self._refusal(name, expected)
    for number in value:
      if type(number) not in (_Int, _Float) or not low <= number <= high:
        raise self._refusal(name, expected)
    return tuple(_Float(number) for number in value)

  def section(self, name: str) -> "Fields":
    """The fields of an object inside; none of them where it is absent."""
    return Fields(self._get(name, {}, ""), f"{self.where}: {name}")

  def require(self, name: str, value: Any, why: str, default: Any) -> None:
    """Refuse any value but one: models that we do not compute.

    Args:
      name: of the field.
      value: the one that is understood.
      why: what another one would mean, for the message.
      default: what an absent field means.
    """
    found = self._get(name, default, "")
    if type(found) is not type(value) or found != value:
      raise self._refusal(name, f"{value!r}: {why}")

  def _get(self, name: str, default: Any, expected: str) -> Any:
    value = self._config.get(name)
    value = default if value is None else value
    if value is None:
      raise BackboneError(
        f"{self.where}: {name} is missing, expected {expected}."
      )
    return value

  def _refusal(self, name: str, expected: str) -> BackboneError:
    found = brief(self._config.get(name))
    return BackboneError(
      f"{self.where}: {name} is {found}, expected {expected}."
    )

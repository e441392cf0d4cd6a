"""Read and check the fields of an untrusted config.json."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief

_T = TypeVar("_T")


class Fields:
  """Fields of an untrusted JSON object.

  A null field counts as absent, because transformers writes null for None. For
  an invalid value, or for an absent field without a default, `BackboneError`
  states the file, the key, the value and the expected values.
  """

  def __init__(self, config: Any, where: str) -> None:
    if not isinstance(config, Mapping):
      raise BackboneError(f"{where} is {brief(config)}, expected an object.")
    self._config = config
    self.where = where

  def has(self, name: str) -> bool:
    """Return whether a field exists and is not null."""
    return self._config.get(name) is not None

  def require_known(self, known: Iterable[str]) -> None:
    """Raise if a field, null or not, has a name that is not in `known`."""
    names = sorted(known)
    for name in sorted(map(str, self._config.keys() - set(names))):
      raise BackboneError(
        f"{self.where} has {brief(name)}, which is not supported: expected "
        f"only {', '.join(names)}."
      )

  def is_null(self, name: str) -> bool:
    """Return whether a field exists and is null."""
    return name in self._config and not self.has(name)

  def is_number(self, name: str) -> bool:
    return type(self._config.get(name)) in (int, float)

  def names(self, name: str) -> list[Any]:
    """Return the list in a field; [] if the field does not hold a list."""
    value = self._config.get(name)
    return value if isinstance(value, list) else []

  def whole(
    self, name: str, low: int, high: int, default: int | None = None
  ) -> int:
    expected = f"a whole number, {low} to {high:,}"
    value: int = self._checked(
      name, default, expected, lambda v: type(v) is int and low <= v <= high
    )
    return value

  def number(
    self, name: str, low: float, high: float, default: float | None = None
  ) -> float:
    expected = f"a number, {low:g} to {high:g}"
    return float(
      self._checked(name, default, expected, lambda v: _is_number(v, low, high))
    )

  def choice(
    self, name: str, choices: Mapping[str, _T], default: str | None = None
  ) -> _T:
    """Return `choices[value]`; an absent field has the value `default`."""
    expected = f"one of {', '.join(map(repr, choices))}"
    return choices[
      self._checked(
        name, default, expected, lambda v: type(v) is str and v in choices
      )
    ]

  def flag(self, name: str, default: bool | None = None) -> bool:
    value: bool = self._checked(
      name, default, "true or false", lambda v: type(v) is bool
    )
    return value

  def text(self, name: str, default: str | None = None) -> str:
    """Return a string of at most 200 characters."""
    value: str = self._checked(
      name, default, "a string of at most 200 characters",
      lambda v: type(v) is str and len(v) <= 200,
    )  # fmt: skip
    return value

  def size(
    self, name: str, low: int, high: int, default: int | None = None
  ) -> int:
    """Read a side h, stated as h, [h, h] or {"height": h, "width": h}."""
    expected = (
      f"the side of a square, {low} to {high:,}: a number, or [h, w] or "
      '{"height": h, "width": w} with h = w'
    )

    def fits(value: Any) -> bool:
      sides = _sides(value)
      whole = all(type(side) is int and low <= side <= high for side in sides)
      return whole and len(sides) == 2 and sides[0] == sides[1]

    side: int = _sides(self._checked(name, default, expected, fits))[0]
    return side

  def numbers(
    self, name: str, count: int, low: float, high: float
  ) -> tuple[float, ...]:
    """Return a list of `count` numbers as a tuple."""
    values = self._checked(
      name, None, f"a list of {count} numbers, {low:g} to {high:g}",
      lambda v: isinstance(v, list | tuple) and len(v) == count
      and all(_is_number(item, low, high) for item in v),
    )  # fmt: skip
    return tuple(map(float, values))

  def section(self, name: str) -> "Fields":
    """Return the fields of a nested object; an absent object has no fields."""
    inside = self._config.get(name)
    return Fields({} if inside is None else inside, f"{self.where}: {name}")

  def require(self, name: str, value: Any, why: str, default: Any) -> None:
    """Raise unless a field has the value `value`; the error states `why`."""
    self._checked(
      name, default, f"{value!r}: {why}",
      lambda v: type(v) is type(value) and v == value,
    )  # fmt: skip

  def _checked(
    self,
    name: str,
    default: Any,
    expected: str,
    fits: Callable[[Any], bool],
  ) -> Any:
    value = self._config.get(name)
    value = default if value is None else value
    if value is None or not fits(value):
      actual = "missing" if value is None else brief(self._config.get(name))
      raise BackboneError(
        f"{self.where}: {name} is {actual}, expected {expected}."
      )
    return value


def _is_number(value: Any, low: float, high: float) -> bool:
  return type(value) in (int, float) and low <= value <= high


def _sides(value: Any) -> list[Any]:
  if isinstance(value, Mapping) and value.keys() == {"height", "width"}:
    return [value["height"], value["width"]]
  return value if isinstance(value, list) else [value, value]

"""Options: fields of a dataclass that hold their rules beside their default."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any, Literal

from memory_vit.errors import ConfigError
from memory_vit.runtime import messages, schema
from memory_vit.runtime.rules import Items, Rule

# Whether a resumed run may have another value: never (the default), on request,
# or freely (no result depends on it).
Resume = Literal["never", "on_request", "free"]


@dataclasses.dataclass(frozen=True)
class Option:
  """An option with its rules.

  Attributes:
    key: its name in the configuration, "data.train".
    owner: the dataclass whose source declares it, which others may inherit.
    annotation: the type of its values, int.
    default: its value where nothing is said.
    rule: the values that it may have; None is one, too, if its type allows it.
    about: what it means, as the help of its flag says it; of a configuration
      that is the comment above it.
    metavar: what stands for its value in that help.
    resume: whether it may change when a run goes on.
    sweep: whether the trials of a sweep may differ in it.
  """

  key: str
  owner: type
  annotation: Any
  default: Any
  rule: Rule
  about: str
  metavar: str | None
  resume: Resume
  sweep: bool

  @property
  def kind(self) -> str:
    """The name of its type, "int"."""
    return schema.type_name(self.annotation)

  @property
  def expected(self) -> str:
    """Its type and rule, the words after "expected"."""
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
  """Declare a field that is an option; see `Option` for the arguments."""
  metadata = {
    "rule": rule, "about": about, "metavar": metavar, "resume": resume,
    "sweep": sweep,
  }  # fmt: skip
  return dataclasses.field(default=default, metadata=metadata)


def section(default: Any, *, on_request: bool) -> Any:
  """Declare a field that holds a dataclass of options.

  Without `on_request`, options in it that declare it never change here.
  """
  return dataclasses.field(default=default, metadata={"on_request": on_request})


def table(cls: type, prefix: str = "") -> dict[str, Option]:
  """List the options of a configuration, those of its sections too.

  Args:
    cls: a dataclass of `option`s and further such dataclasses.
    prefix: what stands before the keys.

  Returns:
    {key: option}, in the order of the fields.

  Raises:
    TypeError: for a field that declares no rules.
  """
  found = {}
  for field in dataclasses.fields(cls):
    key = f"{prefix}{field.name}"
    if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
      for inner in table(field.type, f"{key}.").values():
        on_request = field.metadata.get("on_request", True)
        if inner.resume == "on_request" and not on_request:
          inner = dataclasses.replace(inner, resume="never")
        found[inner.key] = inner
    elif "rule" in field.metadata:
      owner = next(c for c in cls.__mro__ if field.name in c.__annotations__)
      found[key] = Option(
        key, owner, field.type, field.default, **field.metadata
      )
    else:
      raise TypeError(
        f"{cls.__name__}.{field.name} declares no rules: expected a field made "
        "by `options.option`."
      )
  return found


def require(values: Any, prefix: str = "") -> None:
  """Check every option of a dataclass against its own type and rule.

  Args:
    values: the dataclass, whose types are no strings.
    prefix: what stands before the names in a message, such as "config.".

  Raises:
    ConfigError: for the first value that is refused.
  """
  for field in dataclasses.fields(values):
    name, value = f"{prefix}{field.name}", getattr(values, field.name)
    if dataclasses.is_dataclass(value):
      require(value, f"{name}.")
    else:
      _require(name, value, field.type, field.metadata["rule"])


def checked(name: str, value: Any, option: Option) -> Any:
  """The value of an option, of its type: a list becomes a tuple.

  Raises:
    ConfigError: for one of another type, or one that its rule refuses.
  """
  _require(name, value, option.annotation, option.rule)
  return schema.typed(option.annotation, value, name, ConfigError)


def _require(name: str, value: Any, kind: Any, rule: Rule) -> None:
  """Raise for a value, of several for the first that is wrong."""
  if (
    isinstance(rule, Items)
    and isinstance(value, list | tuple)
    and len(value) <= rule.most
  ):
    of_each, *_ = typing.get_args(kind)
    for i, item in enumerate(value):
      _require(f"{name}[{i}]", item, of_each, rule.rule)
  elif not schema.fits(kind, value):
    expected = f"{schema.type_name(kind)}: {rule.expected}"
    raise ConfigError(messages.refusal(name, value, expected))
  elif value is not None and not rule.accepts(value):
    raise ConfigError(messages.refusal(name, value, rule.expected))


def unknown(
  where: str, key: str, known: Iterable[str], prefix: str = ""
) -> str:
  """The refusal of a name that no option has, with the three most like it."""

  def likeness(name: str) -> float:
    whole = difflib.SequenceMatcher(None, key, name).ratio()
    ends = key.rpartition(".")[2], name.rpartition(".")[2]
    return max(whole, difflib.SequenceMatcher(None, *ends).ratio())

  near = sorted(known, key=likeness, reverse=True)[:3]
  listed = ", ".join(f"{prefix}{name}" for name in near)
  return f"{where} has no option {messages.brief(key)}; nearest: {listed}."

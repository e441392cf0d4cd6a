"""Options: fields of a dataclass that hold their rules beside their default."""

import dataclasses
import typing
from typing import Any, Literal

from memory_vit.runtime import messages
from memory_vit.runtime.rules import Items, Rule

# Whether a run may go on with another value than it began with: never, on
# request, or freely (no result depends on it).
Resume = Literal["never", "on_request", "free"]


@dataclasses.dataclass(frozen=True)
class Option:
  """An option with its rules.

  Attributes:
    key: its name in the configuration, "data.train".
    owner: the dataclass whose source declares it, which others may inherit.
    kind: the name of its type, "int".
    default: its value where nothing is said.
    rule: the values that it may have.
    resume: whether it may change when a run goes on.
    sweep: whether the trials of a sweep may differ in it.
  """

  key: str
  owner: type
  kind: str
  default: Any
  rule: Rule
  resume: Resume
  sweep: bool


def option(
  default: Any, rule: Rule, *, resume: Resume, sweep: bool = False
) -> Any:
  """Declare a field of a configuration; see `Option` for the arguments."""
  known = typing.get_args(Resume)
  if resume not in known:
    raise ValueError(f"resume is {resume!r}, expected one of {known}.")
  metadata = {"rule": rule, "resume": resume, "sweep": sweep}
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
        key, owner, _kind(field.type), field.default, **field.metadata
      )
    else:
      raise TypeError(
        f"{cls.__name__}.{field.name} declares no rules: expected a field made "
        "by `options.option`."
      )
  return found


def problems(values: Any, where: str) -> list[str]:
  """Check every value of a configuration against its own rule.

  Returns:
    A line for each value that is refused; in it `where`, such as "config", is
    the name of the configuration.
  """
  lines = []
  for field in dataclasses.fields(values):
    name, value = f"{where}.{field.name}", getattr(values, field.name)
    if dataclasses.is_dataclass(value):
      lines += problems(value, name)
    elif not field.metadata["rule"].accepts(value):
      lines.append(_refusal(name, value, field.metadata["rule"]))
  return lines


def _refusal(name: str, value: Any, rule: Rule) -> str:
  """The message for a refused value; of several, for the first wrong one."""
  if isinstance(rule, Items) and len(value) <= rule.most:
    rule = rule.rule
    wrong = next(i for i, item in enumerate(value) if not rule.accepts(item))
    name, value = f"{name}[{wrong}]", value[wrong]
  return f"{name} is {messages.brief(value)}, expected {rule.expected}."


def _kind(annotation: Any) -> str:
  """The name of a type, as messages and --help show it."""
  if "[" in str(annotation):
    return str(annotation).replace("typing.", "")
  return annotation.__name__

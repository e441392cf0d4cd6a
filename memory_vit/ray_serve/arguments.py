"""Arguments of the application: what `serve run` and its config files say.

Names, defaults and rules are those of `PredictorConfig` and `ServerSettings`,
of which the flags of `memory-vit serve` are made as well; `Scaling` adds those
of replicas.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from memory_vit.errors import ConfigError
from memory_vit.prediction.config import PredictorConfig
from memory_vit.runtime.messages import brief, name_list
from memory_vit.runtime.rules import Number, Rule
from memory_vit.serving.settings import ServerSettings

# Those of `PredictorConfig` that the server has as flags; `task` is `tasks`.
_MODEL = (
  "backbone", "dtype", "batch_sizes", "image_size", "slots", "cells", "classes",
  "memory_mib",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16")
# What one server has and its replicas have not, and who has it here.
_ELSEWHERE = {
  "host": "http_options of the config file, or serve start --http-host",
  "port": "http_options of the config file, or serve start --http-port",
  "timeout_keep_alive": "http_options of the config file, keep_alive_timeout_s",
}
_GIVEN_APART = frozenset({"timeout_keep_alive"})


def _number(default: Any, rule: Rule, about: str) -> Any:
  return dataclasses.field(
    default=default, metadata={"rule": rule, "about": about}
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
  """How many replicas there are, and what each gets of the cluster.

  Raises:
    ConfigError: for a number that its rule refuses.
  """

  num_replicas: int = _number(
    1, Number(1, 10_000, "replicas"), "replicas, where their number is fixed"
  )
  max_replicas: int = _number(
    0,
    Number(0, 10_000, "replicas; 0: their number is fixed"),
    "replicas under load, at most; it then changes, and num_replicas does not "
    "count",
  )
  min_replicas: int = _number(
    1, Number(0, 10_000, "replicas"), "replicas without load, at least"
  )
  target_ongoing_requests: float = _number(
    8.0,
    Number(0, 65_536, "requests", positive=True),
    "requests at work in a replica, to which their number is fitted",
  )
  num_cpus: float = _number(1.0, Number(0, 65_536, "CPUs"), "CPUs of a replica")
  num_gpus: float = _number(
    0.0, Number(0, 1_024, "GPUs, or a share of one"), "GPUs of a replica"
  )
  change_timeout: float = _number(
    300.0,
    Number(0, 86_400, "seconds", positive=True),
    "seconds until all replicas are ready for a change of tasks, which may "
    "compile; else it is refused",
  )

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value, rule = getattr(self, field.name), field.metadata["rule"]
      if not rule.accepts(value):
        raise ConfigError(
          f"{field.name} is {brief(value)}, expected {rule.expected}."
        )
    if self.max_replicas and self.min_replicas > self.max_replicas:
      raise ConfigError(
        f"min_replicas is {self.min_replicas}, expected at most max_replicas, "
        f"{self.max_replicas}."
      )


@dataclasses.dataclass(frozen=True)
class Deployed:
  """What is deployed: the model, the server, and how it is scaled."""

  model: PredictorConfig
  server: ServerSettings
  scaling: Scaling


class _Checked(pydantic.BaseModel):
  """Refuses what it does not know, in one line."""

  model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

  @classmethod
  def model_validate(cls, obj: Any, **options: Any) -> typing.Self:
    """Check arguments, as Ray Serve does by this name.

    Raises:
      ConfigError: for the first that cannot be used.
    """
    try:
      checked = super().model_validate(obj, **options)
    except pydantic.ValidationError as error:
      raise _explained(error, list(cls.model_fields)) from None
    deployed(checked)
    return checked

  @pydantic.field_validator(
    "task", "batch_sizes", mode="before", check_fields=False
  )
  @classmethod
  def _split(cls, value: Any) -> Any:
    """A text with commas is a list, as on the command line."""
    return value.split(",") if isinstance(value, str) else value


def _explained(
  error: pydantic.ValidationError, known: list[str]
) -> ConfigError:
  """One line for the first problem."""
  first = error.errors(include_url=False)[0]
  name = str(first["loc"][0]) if first["loc"] else ""
  if name in _ELSEWHERE:
    return ConfigError(f"{name} is not of a replica: see {_ELSEWHERE[name]}.")
  if first["type"] == "extra_forbidden":
    return ConfigError(
      f"there is no argument {brief(name)}, expected some of "
      f"{name_list(known, 64)}."
    )
  if first["type"] == "missing":
    return ConfigError(f"the argument {name} is missing, expected {name}=...")
  if not name:
    return ConfigError("the arguments are no mapping of names to values.")
  return ConfigError(f"{name} is {brief(first['input'])}: {first['msg']}.")


def _fields() -> Mapping[str, Any]:
  """(type, field) of each argument, as `pydantic.create_model` wants them."""
  found: dict[str, Any] = {"task": (tuple[str, ...], ())}
  for source in (PredictorConfig, ServerSettings, Scaling):
    types = typing.get_type_hints(source)
    for field in dataclasses.fields(source):
      if source is PredictorConfig and field.name not in _MODEL:
        continue
      if field.name in _GIVEN_APART:
        continue
      default = ... if field.default is dataclasses.MISSING else field.default
      about = field.metadata.get("about")
      found[field.name] = (
        types[field.name], pydantic.Field(default, description=about),
      )  # fmt: skip
  return found


Arguments = pydantic.create_model(
  "Arguments",
  __base__=_Checked,
  __module__=__name__,
  __doc__="Arguments of `application`; see the module.",
  **typing.cast(Any, _fields()),
)


def deployed(arguments: pydantic.BaseModel) -> Deployed:
  """What arguments describe.

  Raises:
    ConfigError: for values that a rule refuses.
  """
  values = dict(arguments)
  values["tasks"] = tuple(values.pop("task"))
  if values["dtype"] not in _DTYPES:
    raise ConfigError(
      f"dtype is {brief(values['dtype'])}, expected one of {list(_DTYPES)}."
    )

  def made(source: type) -> Any:
    names = {field.name for field in dataclasses.fields(source)}
    return source(**{k: v for k, v in values.items() if k in names})

  model = {name: values[name] for name in ("tasks", *_MODEL)}
  return Deployed(PredictorConfig(**model), made(ServerSettings), made(Scaling))

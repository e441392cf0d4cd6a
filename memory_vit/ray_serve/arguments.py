"""Arguments of the application: what `serve run` and its config files say.

Names, defaults and rules are those of `PredictorConfig` and `ServerSettings`,
of which the flags of `memory-vit serve` are made as well; `Scaling` adds those
of replicas.
"""

import dataclasses
import typing
from typing import Any

import pydantic

from memory_vit.errors import ConfigError
from memory_vit.prediction.config import PredictorConfig
from memory_vit.runtime import messages, options
from memory_vit.runtime.options import Option, option
from memory_vit.runtime.rules import Choice, Number
from memory_vit.serving.settings import ServerSettings

# Those of `PredictorConfig` that the server has as flags; `task` is `tasks`.
_MODEL = (
  "backbone", "dtype", "batch_sizes", "image_size", "slots", "cells", "classes",
  "memory_mib",
)  # fmt: skip
# "auto" is of one machine, and replicas may have several.
_DTYPES = Choice(("float32", "bfloat16"))
# What one server has and its replicas have not, and who has it here.
_ELSEWHERE = {
  "host": "http_options of the config file, or serve start --http-host",
  "port": "http_options of the config file, or serve start --http-port",
  "timeout_keep_alive": "http_options of the config file, keep_alive_timeout_s",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
  """How many replicas there are, and what each gets of the cluster.

  Raises:
    ConfigError: for a number that its rule refuses.
  """

  num_replicas: int = option(
    1, Number(1, 10_000, "replicas"), "replicas, where their number is fixed"
  )
  max_replicas: int = option(
    0,
    Number(0, 10_000, "replicas; 0: their number is fixed"),
    "replicas under load, at most; it then changes, and num_replicas does not "
    "count",
  )
  min_replicas: int = option(
    1, Number(0, 10_000, "replicas"), "replicas without load, at least"
  )
  target_ongoing_requests: float = option(
    8.0,
    Number(0, 65_536, "requests", positive=True),
    "requests at work in a replica, to which their number is fitted",
  )
  num_cpus: float = option(1.0, Number(0, 65_536, "CPUs"), "CPUs of a replica")
  num_gpus: float = option(
    0.0, Number(0, 1_024, "GPUs, or a share of one"), "GPUs of a replica"
  )
  change_timeout: float = option(
    300.0,
    Number(0, 86_400, "seconds", positive=True),
    "seconds until all replicas are ready for a change of tasks, which may "
    "compile; else it is refused",
  )

  def __post_init__(self) -> None:
    options.require(self)
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
      raise _explained(error) from None
    deployed(checked)
    return checked

  @pydantic.field_validator(
    "task", "batch_sizes", mode="before", check_fields=False
  )
  @classmethod
  def _split(cls, value: Any) -> Any:
    """A text with commas is a list, as on the command line."""
    return value.split(",") if isinstance(value, str) else value


def _explained(error: pydantic.ValidationError) -> ConfigError:
  """One line for the first problem."""
  first = error.errors(include_url=False)[0]
  name = str(first["loc"][0]) if first["loc"] else ""
  if name in _ELSEWHERE:
    return ConfigError(f"{name} is not of a replica: see {_ELSEWHERE[name]}.")
  if first["type"] == "extra_forbidden":
    return ConfigError(options.unknown("the application", name, _OPTIONS))
  if first["type"] == "missing":
    return ConfigError(f"the argument {name} is missing, expected {name}=...")
  if not name:
    return ConfigError("the arguments are no mapping of names to values.")
  expected = _OPTIONS[name].expected
  return ConfigError(messages.refusal(name, first["input"], expected))


def _options() -> dict[str, Option]:
  """The arguments, and what declares each."""
  model = options.table(PredictorConfig)
  found = {"task": model["tasks"], **{name: model[name] for name in _MODEL}}
  found |= options.table(ServerSettings) | options.table(Scaling)
  return {name: o for name, o in found.items() if name not in _ELSEWHERE}


_OPTIONS = _options()
_FIELDS: Any = {
  name: (o.annotation, ... if o.default is dataclasses.MISSING else o.default)
  for name, o in _OPTIONS.items()
}
Arguments = pydantic.create_model(
  "Arguments",
  __base__=_Checked,
  __module__=__name__,
  __doc__="Arguments of `application`; see the module.",
  **_FIELDS,
)


def deployed(arguments: pydantic.BaseModel) -> Deployed:
  """What arguments describe.

  Raises:
    ConfigError: for values that a rule refuses.
  """
  values = dict(arguments)
  values["tasks"] = tuple(values.pop("task"))
  if not _DTYPES.accepts(values["dtype"]):
    raise ConfigError(
      messages.refusal("dtype", values["dtype"], _DTYPES.expected)
    )

  def made(source: type) -> Any:
    names = {field.name for field in dataclasses.fields(source)}
    return source(**{k: v for k, v in values.items() if k in names})

  model = {name: values[name] for name in ("tasks", *_MODEL)}
  return Deployed(PredictorConfig(**model), made(ServerSettings), made(Scaling))

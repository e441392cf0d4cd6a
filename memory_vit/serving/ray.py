"""The server on Ray Serve: replicas that follow one folder of tasks.

  serve run memory_vit.serving.ray:application backbone=... task=...

The arguments are the fields of `Scaling`, and the flags of `memory-vit serve`
with the same names, defaults and rules.
"""

# No `from __future__ import annotations`: `options` needs types, not strings.

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
from etils import epy

from memory_vit.errors import ConfigError, TrainingError
from memory_vit.prediction.config import PredictorConfig
from memory_vit.runtime import messages, options
from memory_vit.runtime.options import Choice, Number, Option, option
from memory_vit.serving.server_log import log_to_stderr
from memory_vit.serving.settings import ServerSettings

with epy.lazy_imports():  # needed only after arguments are checked
  from PIL import Image
  from ray import serve

  from memory_vit.prediction import predictor as predictors
  from memory_vit.serving import app as apps

if TYPE_CHECKING:
  from fastapi import FastAPI
  from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "MemoryViT"
# Fields of `PredictorConfig` that users may give as arguments. The argument for
# the field `tasks` is named `task`.
_MODEL = (
  "backbone", "tasks", "dtype", "batch_sizes", "image_size", "slots", "cells",
  "classes", "memory_mib",
)  # fmt: skip
# Not "auto", which could choose different dtypes on different machines.
_DTYPES = Choice(("float32", "bfloat16"))
# Flags of `memory-vit serve` that replicas lack, and where to set them instead.
_ELSEWHERE = {
  "host": "http_options of the config file, or serve start --http-host",
  "port": "http_options of the config file, or serve start --http-port",
  "timeout_keep_alive": "http_options of the config file, keep_alive_timeout_s",
}
_NOT_SHARED = (
  "tasks cannot be changed here: replicas share tasks through state_dir, which "
  "is not set."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
  """The number of replicas, and the resources of each."""

  num_replicas: int = option(
    1, Number(1, 10_000, "replicas"), "number of replicas, if max_replicas is 0"
  )
  max_replicas: int = option(
    0,
    Number(0, 10_000, "replicas; 0: their number is fixed"),
    "maximum number of replicas; if above 0, their number follows the load, "
    "and num_replicas has no effect",
  )
  min_replicas: int = option(
    1, Number(0, 10_000, "replicas"), "minimum number of replicas, without load"
  )
  target_ongoing_requests: float = option(
    8.0,
    Number(0, 65_536, "requests", positive=True),
    "number of requests in progress per replica that autoscaling aims at",
  )
  num_cpus: float = option(1.0, Number(0, 65_536, "CPUs"), "CPUs per replica")
  num_gpus: float = option(
    0.0, Number(0, 1_024, "GPUs, or a share of one"), "GPUs per replica"
  )

  def __post_init__(self) -> None:
    options.require(self)
    if self.max_replicas and self.min_replicas > self.max_replicas:
      raise ConfigError(
        f"min_replicas is {self.min_replicas}, expected at most "
        f"{self.max_replicas} (max_replicas)."
      )


@dataclasses.dataclass(frozen=True)
class Deployed:
  """Configuration of a deployment: settings of model, server and scaling."""

  model: PredictorConfig
  server: ServerSettings
  scaling: Scaling


def application(arguments: dict[str, Any]) -> "serve.Application":
  """Build the Ray Serve application.

  Args:
    arguments: {name: value}; values may be strings, with commas for lists.

  Raises:
    ConfigError: for invalid arguments.
  """
  config = with_whole_paths(deployed(arguments))

  # `build` is a local function, so that Ray sends it to replicas by value.
  def build() -> "FastAPI":
    return replica_app(config)

  deployment = serve.deployment(name=NAME, **deployment_options(config))
  return deployment(serve.ingress(build)(Replica)).bind()


def arguments_table() -> dict[str, Option]:
  model = options.table(PredictorConfig)
  table = {name: model[name] for name in _MODEL}
  table |= options.table(ServerSettings) | options.table(Scaling)
  table["task"] = table.pop("tasks")
  return {name: o for name, o in table.items() if name not in _ELSEWHERE}


def deployed(arguments: Mapping[str, Any]) -> Deployed:
  table = arguments_table()
  for name in arguments:
    if name in _ELSEWHERE:
      raise ConfigError(
        f"{name} does not apply to replicas: see {_ELSEWHERE[name]}."
      )
    if name not in table:
      raise ConfigError(options.unknown("the application", name, table))
  if "backbone" not in arguments:
    raise ConfigError("the argument backbone is missing, expected backbone=...")
  values = dict(arguments)
  for name in ("task", "batch_sizes"):
    if isinstance(text := values.get(name), str):
      values[name] = text.split(",")

  def validated(cls: Any, names: Mapping[str, str]) -> Any:
    fields = {f: values[name] for f, name in names.items() if name in values}
    try:
      return pydantic.TypeAdapter(cls).validate_python(fields)
    except pydantic.ValidationError as error:
      first = error.errors(include_url=False)[0]
      if not first["loc"]:  # the error was raised by `__post_init__`
        raise ConfigError(str(first["ctx"]["error"])) from None
      name = names[str(first["loc"][0])]
      raise ConfigError(
        messages.refusal(name, values[name], table[name].expected)
      ) from None

  model = validated(
    PredictorConfig,
    {name: "task" if name == "tasks" else name for name in _MODEL},
  )
  if not _DTYPES.accepts(model.dtype):
    raise ConfigError(messages.refusal("dtype", model.dtype, _DTYPES.expected))
  server, scaling = (
    validated(cls, {name: name for name in options.table(cls)})
    for cls in (ServerSettings, Scaling)
  )
  return Deployed(model, server, scaling)


def with_whole_paths(what: Deployed) -> Deployed:
  """Make relative paths absolute, because replicas run in another directory."""

  def whole(path: Any) -> Any:
    is_path = path and "://" not in path  # not a URL such as hf://
    return str(Path(path).expanduser().absolute()) if is_path else path

  model, server = what.model, what.server
  source = model.backbone
  if Path(source).expanduser().exists():  # a path, not a short name
    source = whole(source)
  return dataclasses.replace(
    what,
    model=dataclasses.replace(
      model,
      backbone=source,
      tasks=tuple(map(whole, model.tasks)),
    ),
    server=dataclasses.replace(
      server,
      token_file=whole(server.token_file),
      task_root=whole(server.task_root),
      state_dir=whole(server.state_dir),
    ),
  )


def deployment_options(what: Deployed) -> dict[str, Any]:
  """Return options of Ray Serve; its config file can override each option."""
  scaling, server = what.scaling, what.server
  ray_options: dict[str, Any] = {
    "max_ongoing_requests": server.max_connections,
    "graceful_shutdown_timeout_s": server.grace,
    "ray_actor_options": {
      "num_cpus": scaling.num_cpus, "num_gpus": scaling.num_gpus,
    },
  }  # fmt: skip
  if scaling.max_replicas:
    ray_options["autoscaling_config"] = {
      "min_replicas": scaling.min_replicas,
      "max_replicas": scaling.max_replicas,
      "target_ongoing_requests": scaling.target_ongoing_requests,
    }
  else:
    ray_options["num_replicas"] = scaling.num_replicas
  return ray_options


def replica_app(what: Deployed) -> "FastAPI":
  # Silence Pillow's warning about large images: the server itself refuses them.
  warnings.simplefilter("ignore", Image.DecompressionBombWarning)
  log_to_stderr()
  app = apps.create_app(
    predictors.Predictor(what.model, warm_up=False),
    what.server,
    refuse_changes="" if what.server.state_dir else _NOT_SHARED,
  )
  name = serve.get_replica_context().replica_id.unique_id
  app.add_middleware(_ReplicaHeader, name=name)
  return app


class _ReplicaHeader:
  """ASGI middleware that adds the header `x-replica: NAME` to all answers."""

  def __init__(self, app: "ASGIApp", name: str) -> None:
    self._app, self._header = app, (b"x-replica", name.encode())

  async def __call__(
    self, scope: "Scope", receive: "Receive", send: "Send"
  ) -> None:
    async def named(message: "Message") -> None:
      if message["type"] == "http.response.start":
        message["headers"] = [*message["headers"], self._header]
      await send(message)

    await self._app(scope, receive, named)


class Replica:
  """The FastAPI application with a health check, as Ray Serve deploys it."""

  app: "FastAPI"  # set by `serve.ingress`

  async def check_health(self) -> None:
    """Raise if the warm-up failed, so that Ray replaces the replica."""
    service = self.app.state.service
    await service.settled()
    if service.problem:
      raise TrainingError(service.problem)

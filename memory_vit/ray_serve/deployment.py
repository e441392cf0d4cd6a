"""The deployment: the application of one server, on replicas of Ray Serve."""

# Annotations stay classes here: Ray Serve reads that of `application`.

import dataclasses
import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from etils import epy
from fastapi import FastAPI
from PIL import Image
from ray import serve

from memory_vit.errors import TaskError, TrainingError
from memory_vit.ray_serve.arguments import Arguments, Deployed, deployed
from memory_vit.ray_serve.ledger_calls import PROTOCOL
from memory_vit.ray_serve.replica_header import ReplicaHeader
from memory_vit.runtime import compile_cache
from memory_vit.runtime.messages import brief
from memory_vit.serving.server_log import log_to_stderr

with epy.lazy_imports():  # once it is said where compiled programs are kept
  from memory_vit.prediction import predictor as predictors
  from memory_vit.ray_serve import ledger_actor, shared_changes
  from memory_vit.serving import app as apps
  from memory_vit.tasks import manifest, single_file, store

NAME = "MemoryViT"


def application(arguments: Arguments) -> serve.Application:  # type: ignore[valid-type]
  """Build the application of Ray Serve.

  `serve run memory_vit.ray_serve:application backbone=... task=...`

  Args:
    arguments: see `memory_vit.ray_serve.arguments`.

  Raises:
    ConfigError: for values that cannot be used.
    MemoryVitError: for tasks that cannot be found or read here.
  """
  what = with_whole_paths(deployed(arguments))

  given = contents_of(what.model.tasks)

  # A function of this function: Ray sends it to replicas by its value.
  def build() -> FastAPI:
    return replica_app(what, given)

  deployment = serve.deployment(name=NAME, **deployment_options(what))
  return deployment(serve.ingress(build)(Replica)).bind()


def with_whole_paths(what: Deployed) -> Deployed:
  """Make relative paths whole: replicas have another current directory."""

  def whole(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path else path

  model, server = what.model, what.server
  source = model.backbone  # a short name and an address are no paths
  if Path(source).exists():
    source = str(Path(source).absolute())
  return dataclasses.replace(
    what,
    model=dataclasses.replace(
      model,
      backbone=source,
      tasks=tuple(str(Path(task).absolute()) for task in model.tasks),
    ),
    server=dataclasses.replace(
      server,
      token_file=whole(server.token_file),
      task_root=whole(server.task_root),
      state_dir=whole(server.state_dir),
    ),
  )


def deployment_options(what: Deployed) -> dict[str, Any]:
  """Options of Ray Serve; a config file can set each of them anew."""
  scaling, server = what.scaling, what.server
  options: dict[str, Any] = {
    "max_ongoing_requests": server.max_connections,
    "graceful_shutdown_timeout_s": server.grace,
    "ray_actor_options": {
      "num_cpus": scaling.num_cpus, "num_gpus": scaling.num_gpus,
    },
  }  # fmt: skip
  if scaling.max_replicas:
    options["autoscaling_config"] = {
      "min_replicas": scaling.min_replicas,
      "max_replicas": scaling.max_replicas,
      "target_ongoing_requests": scaling.target_ongoing_requests,
    }
  else:
    options["num_replicas"] = scaling.num_replicas
  return options


def replica_app(what: Deployed, given: str) -> FastAPI:
  """The application in a replica: its tasks are those of all replicas.

  Args:
    what: the arguments.
    given: the contents of its tasks, when they were deployed.
  """
  # Large images are refused as such; Pillow warns from a lower limit on.
  warnings.simplefilter("ignore", Image.DecompressionBombWarning)
  log_to_stderr()
  compile_cache.enable()
  context = serve.get_replica_context()
  replica = context.replica_id.unique_id
  client = ledger_actor.LedgerClient(
    ledger_name(context.app_name, what, given), what.server.state_dir
  )

  def changes(*of_server: Any) -> shared_changes.SharedTaskChanges:
    handle = ray.get_runtime_context().current_actor
    return shared_changes.SharedTaskChanges(
      *of_server,
      ledger=client,
      member=replica,
      handle=handle,
      change_timeout=what.scaling.change_timeout,
      is_kept=what.server.state_dir is not None,
    )

  app = apps.create_app(
    predictors.Predictor(what.model, warm_up=False),
    # The ledger keeps what is added.
    dataclasses.replace(what.server, state_dir=None),
    changes,
  )
  app.add_middleware(ReplicaHeader, replica=replica)
  return app


def contents_of(tasks: Sequence[str]) -> str:
  """SHA-256 of the files that say what tasks are, wherever they lie.

  Args:
    tasks: paths of tasks, and of directories of tasks.

  Raises:
    MemoryVitError: where there is none, or one cannot be read.
  """
  found = hashlib.sha256()
  for path, _ in store.find_tasks(tasks):
    # `task.json` has the digests of all arrays.
    listed = path / manifest.FILE
    files = [path] if path.is_file() else [listed]
    if path.is_dir() and not listed.is_file():
      files = sorted(path.glob(f"*{single_file.SUFFIX}"))
    for file in files:
      try:
        found.update(hashlib.sha256(file.read_bytes()).digest())
      except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TaskError(f"task {brief(str(file))}: {reason}.") from error
  return found.hexdigest()


def ledger_name(app_name: str, what: Deployed, given: str) -> str:
  """One ledger for all replicas of a model: another model has other tasks.

  Args:
    app_name: of the application.
    what: the arguments; limits and sizes do not count.
    given: see `replica_app`.
  """
  parts = (
    PROTOCOL, what.model.backbone, what.model.image_size, given,
    what.server.state_dir,
  )  # fmt: skip
  digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
  return f"{app_name}-tasks-{digest}"


class Replica:
  """What Ray Serve asks of a replica, beside its requests."""

  app: FastAPI  # of `serve.ingress`

  async def check_health(self) -> None:
    """Return once it is ready, so that no request comes before.

    Raises:
      TrainingError: where it failed; Ray Serve then starts another one.
    """
    service: apps.Service = self.app.state.service
    await service.settled()
    if service.problem:
      raise TrainingError(service.problem)

"""The application: its routes, and what holds them together.

`create_app` is the one door: the command serves it with uvicorn, and anything
else that speaks ASGI can.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response

from memory_vit.errors import MemoryVitError
from memory_vit.runtime import memory
from memory_vit.serving.answering import (
  Answering,
  task_set_json,
  unknown_tasks,
)
from memory_vit.serving.attention import Looking
from memory_vit.serving.limits import BodyLimits
from memory_vit.serving.metrics import CONTENT_TYPE, Metrics
from memory_vit.serving.min_version import wait_for_min_version
from memory_vit.serving.page_files import page_response
from memory_vit.serving.predict_requests import (
  media_type,
  parse_json,
  read_predict_request,
)
from memory_vit.serving.request_error import RequestError, busy, one_line
from memory_vit.serving.request_log import RequestLog, client_of
from memory_vit.serving.schemas import (
  PREDICT_BODY,
  TASK_BODY,
  AttentionAnswer,
  ChangeAnswer,
  PredictAnswer,
  Problem,
  ServedTask,
  TaskPath,
  TasksAnswer,
)
from memory_vit.serving.settings import ServerSettings
from memory_vit.serving.task_changes import TaskChanges, audit_refused
from memory_vit.serving.task_folder import TaskFolder
from memory_vit.serving.task_follower import Changed, TaskFollower
from memory_vit.serving.token import Token, read_token
from memory_vit.serving.trusted_hosts import TrustedHosts
from memory_vit.version import __version__

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor, TaskDescription

logger = logging.getLogger(__name__)
_Part = TypeVar("_Part")
_WARMING_SECONDS = 5.0
_TRIM_SECONDS = 10.0
# As nginx has it: the client was gone before it was answered.
_CLIENT_LEFT = 499
# For OpenAPI alone: `Token` checks it.
_BEARER = Depends(HTTPBearer(scheme_name="token", auto_error=False))
_Responses = dict[int | str, dict[str, Any]]
_REFUSED: _Responses = {
  "default": {"model": Problem, "description": "The request is refused."}
}
_CHANGED: _Responses = {
  **_REFUSED,
  201: {"model": ChangeAnswer, "description": "The task was added."},
}
_DESCRIPTION = (
  "Many image classification tasks in one pass of one frozen Vision "
  "Transformer. Tasks can be added and removed while it runs; every answer "
  "names the set of tasks that gave it."
)


class Service:
  """What the routes of one application share.

  Attributes:
    stopping: whether the server was told to end.
  """

  def __init__(
    self, predictor: Predictor, settings: ServerSettings, refusal: str
  ) -> None:
    """Read the token and the tasks of --state_dir; see `create_app`."""
    self.stopping = False
    self.predictor = predictor
    self.settings = settings
    self.metrics = Metrics(predictor.backbone.config.dtype)
    self.token: Token = read_token(settings.token_file)
    self._folder = TaskFolder(settings.state_dir)
    self.follower = TaskFollower(predictor, self._folder)
    self.changes = TaskChanges(
      predictor, self._folder, self.follower, settings.task_root,
      self.metrics.change, refusal,
    )  # fmt: skip
    self._answering: Answering | None = None
    self._looking: Looking | None = None
    self._warm = False
    self.problem = ""  # why it failed, in one line
    self._settled = asyncio.Event()
    self._watch()

  @property
  def state(self) -> str:
    """What the server is doing: "ready", "warming up", "stopping", "failed"."""
    if self.problem:
      return "failed"
    if self.stopping:
      return "stopping"
    return "ready" if self._warm else "warming up"

  async def settled(self) -> None:
    """Wait until it is ready, or has failed."""
    await self._settled.wait()

  @property
  def answering(self) -> Answering:
    """What answers requests.

    Raises:
      RequestError: 503 until all programs are compiled, and at the end.
    """
    return self._once_warm(self._answering)

  @property
  def looking(self) -> Looking:
    """What says where tasks look; raises as `answering` does."""
    return self._once_warm(self._looking)

  def _once_warm(self, part: _Part | None) -> _Part:
    if part is None or not self._warm:
      raise busy(f"the server is {self.state}.", _WARMING_SECONDS)
    return part

  def remove_files(self) -> None:
    """Remove what is not kept for the next start."""
    self._folder.close()

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Compile, beside the first requests for health, until the body ends.

    It waits for no thread: a server ends this once all requests are answered,
    or the time for it is over.
    """
    self._answering = Answering(self.predictor, self.settings, self.metrics)
    self._looking = Looking(self.predictor, self.settings.timeout)
    warming = asyncio.create_task(self._warm_up(self._looking))
    returning = asyncio.create_task(_return_memory())
    following = asyncio.create_task(self._follow())
    try:
      yield
    finally:
      self.stopping = True
      for task in (warming, returning, following):
        task.cancel()
      self._answering.close()
      self._looking.close()
      self.changes.close()
      self.remove_files()

  async def _warm_up(self, looking: Looking) -> None:
    try:
      compiled = await asyncio.to_thread(self.predictor.warm_up)
      await asyncio.to_thread(looking.warm_up)
      await asyncio.to_thread(self.follower.look)
    except Exception as error:
      self.problem = one_line(str(error)) or type(error).__name__
      logger.exception("the warm-up failed; /healthz says so")
    else:
      self._warm = True
      logger.info("ready: %d programs compiled", compiled)
    finally:
      self._settled.set()

  async def _follow(self) -> None:
    await self._settled.wait()
    await self.follower.follow()

  def _watch(self) -> None:
    predictor, watch = self.predictor, self.metrics.watch
    watch(
      "queue_images",
      "Images that were taken and are not yet answered.",
      lambda: self._answering.taken if self._answering else 0,
    )
    watch(
      "compilations",
      "Programs that were compiled since the warm-up.",
      lambda: (
        predictor.compilations
        + (self._looking.compilations if self._looking else 0)
      ),
    )
    watch("tasks", "Tasks that answer.", lambda: len(predictor.task_set.names))
    watch(
      "task_set_version",
      "Version of the set of tasks: 1 more with each change.",
      lambda: predictor.task_set.version,
    )
    watch(
      "task_set_newest",
      "Newest version of the set of tasks in --state_dir.",
      lambda: self.follower.newest,
    )
    watch("ready", "1 if it is ready, else 0.", lambda: self.state == "ready")


async def _return_memory() -> None:
  """Return free memory to the system, which glibc keeps after large bodies."""
  while True:
    await asyncio.sleep(_TRIM_SECONDS)
    await asyncio.to_thread(memory.trim)


def create_app(
  predictor: Predictor,
  settings: ServerSettings,
  *,
  refuse_changes: str = "",
) -> FastAPI:
  """Make the application that answers by a predictor.

  Its lifespan warms the predictor up. `app.state.service.stopping = True` turns
  /readyz to 503.

  Args:
    predictor: with or without tasks; it need not be warm.
    settings: limits, timeouts, and where tasks are kept.
    refuse_changes: why tasks cannot be changed here, such as by a client of
      one of several servers without a `state_dir`; "" if they can.

  Raises:
    MemoryVitError: for settings that cannot be used, such as a token file that
      others may read, or a `state_dir` of another backbone.
  """
  service = Service(predictor, settings, refuse_changes)

  @contextlib.asynccontextmanager
  async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with service.running():
      yield

  app = FastAPI(
    title="memory_vit",
    version=__version__,
    description=_DESCRIPTION,
    lifespan=lifespan,
    docs_url=None,  # these pages would load scripts from elsewhere
    redoc_url=None,
    redirect_slashes=False,  # they would lead to whatever Host says
  )
  app.state.service = service
  _add_refusals(app)
  _add_health(app, service)
  _add_prediction(app, service)
  _add_tasks(app, service)
  _add_page(app)
  app.add_middleware(TrustedHosts, allowed_hosts=settings.allowed_hosts)
  app.add_middleware(BodyLimits, settings=settings)
  app.add_middleware(RequestLog, metrics=service.metrics)  # outermost
  return app


def _add_refusals(app: FastAPI) -> None:
  """Every refusal is JSON with one line."""

  @app.exception_handler(RequestError)
  async def refused(_: Request, error: RequestError) -> Response:
    return error.response()

  @app.exception_handler(MemoryVitError)
  async def bad_input(_: Request, error: MemoryVitError) -> Response:
    return RequestError(422, str(error)).response()

  @app.exception_handler(HTTPException)
  async def no_route(_: Request, error: HTTPException) -> Response:
    return RequestError(
      error.status_code, error.detail, headers=error.headers
    ).response()

  @app.exception_handler(ClientDisconnect)
  async def left(_: Request, error: ClientDisconnect) -> Response:
    # Nobody reads it: so metrics and the log name it, and show no fault.
    return RequestError(_CLIENT_LEFT, "the client left.").response()

  @app.exception_handler(Exception)
  async def failed(_: Request, error: Exception) -> Response:
    # Its traceback goes to the log, and not to strangers.
    return RequestError(500, "the server failed; its log says how.").response()


def _add_health(app: FastAPI, service: Service) -> None:
  @app.get("/healthz", tags=["health"])
  async def healthz() -> Response:
    """Whether the process lives: 500 where its warm-up failed."""
    status = 500 if service.state == "failed" else 200
    return JSONResponse({"status": service.state}, status)

  @app.get("/readyz", tags=["health"])
  async def readyz() -> Response:
    """Whether requests are answered: 503 while it warms up, or stops."""
    status = 200 if service.state == "ready" else 503
    task_set = task_set_json(service.predictor.task_set)
    return JSONResponse(
      {
        "status": service.state,
        "task_set": task_set,
        "newest": service.follower.newest,
        "problem": service.follower.problem or None,
      },
      status,
    )

  @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
  async def metrics() -> Response:
    """Metrics for Prometheus."""
    service.metrics.problem(service.follower.problem)
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_prediction(app: FastAPI, service: Service) -> None:
  @app.post(
    "/v1/predict",
    tags=["images"],
    response_model=PredictAnswer,
    responses=_REFUSED,
    openapi_extra=PREDICT_BODY,
  )
  async def predict(request: Request) -> Response:
    """Answer images by all tasks, or by those that are named."""
    answering = service.answering
    asked = await read_predict_request(request, service.settings.max_images)
    await wait_for_min_version(
      request, service.follower, service.settings.timeout
    )
    return JSONResponse(await answering.answer(asked))

  @app.post(
    "/v1/attention",
    tags=["images"],
    response_model=AttentionAnswer,
    responses=_REFUSED,
    openapi_extra=PREDICT_BODY,
  )
  async def attention(request: Request) -> Response:
    """Answer where the tokens of tasks look in one image, layer by layer."""
    looking = service.looking
    asked = await read_predict_request(request, 1)
    await wait_for_min_version(
      request, service.follower, service.settings.timeout
    )
    return JSONResponse(await looking.look(asked))


def _add_tasks(app: FastAPI, service: Service) -> None:
  @app.get("/v1/tasks", tags=["tasks"], response_model=TasksAnswer)
  async def tasks() -> Response:
    """The tasks that answer now, without the names of their classes."""
    return JSONResponse(_tasks_json(service))

  @app.get(
    "/v1/tasks/{name}",
    tags=["tasks"],
    response_model=ServedTask,
    responses=_REFUSED,
  )
  async def task(name: str) -> Response:
    """One task, with the names of its classes."""
    described = service.predictor.task_set.describe()
    for one in described:
      if one.name == name:
        return JSONResponse(dataclasses.asdict(one))
    raise unknown_tasks([name], [one.name for one in described])

  @app.put(
    "/v1/tasks/{name}",
    tags=["tasks"],
    response_model=ChangeAnswer,
    responses=_CHANGED,
    openapi_extra=TASK_BODY,
    dependencies=[_BEARER],
  )
  async def put_task(name: str, request: Request) -> Response:
    """Add a task, or replace the one of this name."""
    client = _require_token(service, request, "put", name)
    changed = await _put(service.changes, name, request, client)
    return _change_response(name, changed)

  @app.delete(
    "/v1/tasks/{name}",
    tags=["tasks"],
    response_model=ChangeAnswer,
    responses=_CHANGED,
    dependencies=[_BEARER],
  )
  async def delete_task(name: str, request: Request) -> Response:
    """Remove a task."""
    client = _require_token(service, request, "remove", name)
    return _change_response(name, await service.changes.remove(name, client))


async def _put(
  changes: TaskChanges, name: str, request: Request, client: str
) -> Changed:
  """A file as the body itself, or JSON with a path of the server."""
  kind = media_type(request)
  if kind == "application/json":
    path = parse_json(TaskPath, await request.body()).path
    return await changes.put_path(name, path, client)
  if kind in ("application/octet-stream", "application/x-safetensors"):
    return await changes.upload(name, request.stream(), client)
  raise RequestError(
    415,
    f"the body is {one_line(kind) or 'of no type'}, expected "
    "application/octet-stream, the bytes of a task's .safetensors file; or "
    'application/json, {"path": "..."}.',
  )


def _require_token(
  service: Service, request: Request, action: str, name: str
) -> str:
  """Let in who has the token; return the client's address."""
  client = client_of(request.scope)
  try:
    # Of several none counts: joined, as HTTP has it, they are another token.
    credentials = request.headers.getlist("authorization")
    service.token.require(", ".join(credentials))
    if service.changes.refusal:
      raise RequestError(403, service.changes.refusal)
  except RequestError as refusal:
    audit_refused(action, name, client, refusal.message)
    raise
  if service.stopping:
    raise busy("the server is stopping.", _WARMING_SECONDS)
  return client


def _tasks_json(service: Service) -> dict[str, Any]:
  task_set, backbone = service.predictor.task_set, service.predictor.backbone
  return {
    "task_set": task_set_json(task_set),
    "tasks": [_without_classes(one) for one in task_set.describe()],
    "backbone": {
      "variant": backbone.id.variant,
      "image_size": backbone.id.image_size,
      "fingerprint": backbone.id.fingerprint,
      "dtype": backbone.config.dtype,
      "classes": backbone.config.num_classes,
    },
    "changes": service.token.is_set and not service.changes.refusal,
    "max_images": service.settings.max_images,
  }


def _without_classes(described: TaskDescription) -> dict[str, Any]:
  values = dataclasses.asdict(described)
  del values["class_names"]  # thousands of each, in some tasks
  return values


def _change_response(name: str, changed: Changed) -> Response:
  change = changed.change
  content = {
    "action": changed.action,
    "name": name,
    "task_set": {
      "version": change.version,
      "names": list(change.names),
      "digest": change.digest,
    },
    "grew": change.grew,
    "compiled": change.compiled,
  }
  return JSONResponse(content, 201 if changed.action == "add" else 200)


def _add_page(app: FastAPI) -> None:
  for path, name in (
    ("/", "index.html"),
    ("/page.js", "page.js"),
    ("/page.css", "page.css"),
  ):
    answer = functools.partial(page_response, name)
    app.add_api_route(path, answer, include_in_schema=False)

"""HTTP application: middleware, and the routes for health and images."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response

from memory_vit.errors import MemoryVitError
from memory_vit.serving.access import TrustedHosts
from memory_vit.serving.answering import task_set_json
from memory_vit.serving.limits import BodyLimits
from memory_vit.serving.metrics import CONTENT_TYPE
from memory_vit.serving.page_files import add_page
from memory_vit.serving.predict_requests import (
  PredictRequest,
  awaited_task,
  read_predict_request,
)
from memory_vit.serving.request_error import RequestError, client_left
from memory_vit.serving.schemas import (
  PREDICT_BODY,
  REFUSED,
  AttentionAnswer,
  PredictAnswer,
)
from memory_vit.serving.server_log import RequestLog
from memory_vit.serving.service import Service
from memory_vit.serving.settings import ServerSettings
from memory_vit.serving.task_routes import add_task_routes
from memory_vit.version import __version__

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor

T = TypeVar("T")
_DESCRIPTION = (
  "Many tasks (classes, labels or values of images) in one pass of one frozen "
  "Vision Transformer. Tasks can be added and removed while the server "
  "runs; every answer names the set of tasks that produced it."
)


def create_app(
  predictor: Predictor,
  settings: ServerSettings,
  *,
  refuse_changes: str = "",
) -> FastAPI:
  """Create the application that answers requests with a predictor.

  Its lifespan warms up the predictor. `app.state.service.stopping = True` makes
  /readyz return status 503.

  Args:
    predictor: with or without tasks; it need not be warm.
    settings: limits, timeouts, and where tasks are stored.
    refuse_changes: reason why tasks cannot be changed, for example that several
      servers have no common `state_dir`; "" if they can be changed.

  Raises:
    MemoryVitError: for settings that cannot be used, such as a token file that
      other users may read, or a `state_dir` of another backbone.
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
    docs_url=None,  # FastAPI's pages would load scripts from other sites
    redoc_url=None,
    redirect_slashes=False,  # redirects would trust the header Host
  )
  app.state.service = service
  _add_refusals(app)
  _add_health(app, service)
  _add_prediction(app, service)
  add_task_routes(app, service)
  add_page(app)
  _add_heads(app)
  app.add_middleware(TrustedHosts, allowed_hosts=settings.allowed_hosts)
  app.add_middleware(BodyLimits, settings=settings)
  app.add_middleware(RequestLog, metrics=service.metrics)  # outermost layer
  return app


def _add_refusals(app: FastAPI) -> None:
  """Answer every error with JSON that gives the reason in one line."""

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
    return client_left().response()

  @app.exception_handler(Exception)
  async def failed(_: Request, error: Exception) -> Response:
    # The log has the traceback; clients must not see it.
    return RequestError(500, "the server failed; its log says how.").response()


def _add_heads(app: FastAPI) -> None:
  """Answer HEAD (used by load balancers) like GET, but without a body."""
  for route in list(app.routes):
    if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
      app.add_api_route(
        route.path,
        route.endpoint,
        methods=["HEAD"],
        include_in_schema=False,
      )


def _add_health(app: FastAPI, service: Service) -> None:
  @app.get("/healthz", tags=["health"])
  async def healthz() -> Response:
    """Report whether the process is alive: status 500 if its warm-up failed."""
    status = 500 if service.state == "failed" else 200
    return JSONResponse({"status": service.state}, status)

  @app.get("/readyz", tags=["health"])
  async def readyz() -> Response:
    """Report readiness: status 503 during warm-up and shutdown.

    `batch_sizes` lists compiled sizes; `compiling` names missing programs.
    """
    status = 200 if service.state == "ready" else 503
    task_set = task_set_json(service.predictor.task_set)
    return JSONResponse(
      {
        "status": service.state,
        "task_set": task_set,
        "problems": service.follower.problems,
        "batch_sizes": service.predictor.compiled_sizes,
        "compiling": service.compiler.missing,
        "compilation_problems": service.compiler.problems,
      },
      status,
    )

  @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
  async def metrics() -> Response:
    """Return metrics in the text format of Prometheus."""
    service.metrics.task_problems(service.follower.problems)
    service.metrics.compiled(
      service.predictor.batch_sizes,
      service.predictor.compiled_sizes,
      service.compiler.problems,
    )
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_prediction(app: FastAPI, service: Service) -> None:
  @app.post(
    "/v1/predict",
    tags=["images"],
    response_model=PredictAnswer,
    responses=REFUSED,
    openapi_extra=PREDICT_BODY,
  )
  async def predict(request: Request) -> Response:
    """Apply all tasks, or the named tasks, to images."""
    answering = service.answering
    asked = await _asked(service, request, service.settings.max_images)
    return await _answer(request, answering.answer(asked))

  @app.post(
    "/v1/attention",
    tags=["images"],
    response_model=AttentionAnswer,
    responses=REFUSED,
    openapi_extra=PREDICT_BODY,
  )
  async def attention(request: Request) -> Response:
    """Show what the tokens of tasks attend to in one image, in each layer."""
    attention_service = service.attention
    asked = await _asked(service, request, 1)
    return await _answer(request, attention_service.answer(asked))


async def _answer(
  request: Request, work: Coroutine[Any, Any, bytes]
) -> Response:
  json = await _unless_left(request, work)
  return Response(json, media_type="application/json")


async def _asked(
  service: Service, request: Request, max_images: int
) -> PredictRequest:
  """Parse a request; wait for the task in its header `x-wait-for`, if any."""
  asked = await read_predict_request(request, max_images)
  if awaited := awaited_task(request):
    seconds = service.settings.timeout
    wait = service.follower.until(*awaited, seconds)
    await _unless_left(request, wait)
  return asked


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
  """Return `await work`; if the client leaves, cancel `work` and raise 499."""

  async def leave() -> None:
    while (await request.receive())["type"] != "http.disconnect":
      pass

  working, leaving = asyncio.create_task(work), asyncio.create_task(leave())
  try:
    await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
      raise client_left()
    return await working
  finally:
    working.cancel()
    leaving.cancel()

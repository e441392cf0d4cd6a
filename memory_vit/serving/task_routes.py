"""Routes that list tasks, and that add, replace or remove a task."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.responses import JSONResponse, Response

from memory_vit.model.task import NAME_RULE, is_name
from memory_vit.runtime.messages import brief, one_line
from memory_vit.serving.answering import task_set_json, unknown_tasks
from memory_vit.serving.predict_requests import media_type, parse_json
from memory_vit.serving.request_error import RequestError, busy
from memory_vit.serving.schemas import (
  CHANGED,
  REFUSED,
  TASK_BODY,
  ChangeAnswer,
  ServedTask,
  TaskPath,
  TasksAnswer,
  json_bytes,
)
from memory_vit.serving.server_log import client_of
from memory_vit.serving.service import BUSY_SECONDS, Service
from memory_vit.serving.task_changes import logging_refusals
from memory_vit.serving.task_follower import Changed

if TYPE_CHECKING:
  from memory_vit.prediction import TaskSet

# Only describes the token in OpenAPI; `Token.require` checks the token.
_BEARER = Depends(HTTPBearer(scheme_name="token", auto_error=False))


def add_task_routes(app: FastAPI, service: Service) -> None:
  @app.get("/v1/tasks", tags=["tasks"], response_model=TasksAnswer)
  async def tasks() -> Response:
    """List the tasks that answer now, without the names of their classes."""
    return JSONResponse(_tasks_json(service))

  @app.get(
    "/v1/tasks/{name}",
    tags=["tasks"],
    response_model=ServedTask,
    responses=REFUSED,
  )
  async def task(name: str) -> Response:
    """Describe one task, with the names of its classes."""
    described = _described(service.predictor.task_set)
    for entry in described:
      if entry["name"] == name:
        content = json_bytes({**entry, "kind": vars(entry["kind"])})
        return Response(content, media_type="application/json")
    raise unknown_tasks([name], [entry["name"] for entry in described])

  @app.put(
    "/v1/tasks/{name}",
    tags=["tasks"],
    response_model=ChangeAnswer,
    responses=CHANGED,
    openapi_extra=TASK_BODY,
    dependencies=[_BEARER],
  )
  async def put_task(name: str, request: Request) -> Response:
    """Add a task, or replace the task of this name."""
    return await change(request, "put", name)

  @app.delete(
    "/v1/tasks/{name}",
    tags=["tasks"],
    response_model=ChangeAnswer,
    responses=CHANGED,
    dependencies=[_BEARER],
  )
  async def delete_task(name: str, request: Request) -> Response:
    """Remove a task."""
    return await change(request, "remove", name)

  async def change(request: Request, action: str, name: str) -> Response:
    client = client_of(request.scope)
    with logging_refusals(action, name, client):
      _require_allowed(service, request, name)
      make = (
        await _put(service, name, request)
        if action == "put"
        else functools.partial(service.follower.remove, name)
      )
      # Wait for the warm-up, so that no program is compiled twice.
      await service.settled()
      changed = await service.changes.run(client, make)
    status = 201 if changed.action == "add" else 200
    return JSONResponse(vars(changed), status)


async def _put(
  service: Service, name: str, request: Request
) -> Callable[[], Changed]:
  put = functools.partial(service.follower.put, name)
  kind = media_type(request)
  if kind == "application/json":
    text = parse_json(TaskPath, await request.body()).path
    backbone = service.predictor.backbone
    content = functools.partial(service.task_root.content, text, backbone)
    return lambda: put(content(), brief(text))
  if kind in ("application/octet-stream", "application/x-safetensors"):
    body = await request.body()
    return lambda: put(body, "the uploaded task")
  raise RequestError(
    415,
    f"the body is {one_line(kind) or 'of no type'}, expected "
    "application/octet-stream (the bytes of a task's .safetensors file) or "
    'application/json ({"path": "..."}).',
  )


def _require_allowed(service: Service, request: Request, name: str) -> None:
  # Join repeated headers, as HTTP defines. They are then refused, because the
  # joined text is no valid token.
  credentials = request.headers.getlist("authorization")
  service.token.require(", ".join(credentials))
  if service.refuse_changes:
    raise RequestError(403, service.refuse_changes)
  if service.stopping:
    raise busy("the server is stopping.", BUSY_SECONDS)
  if not is_name(name):
    raise RequestError(422, f"task name {brief(name)}: expected {NAME_RULE}.")


def _described(task_set: TaskSet) -> list[dict[str, Any]]:
  """Return the description and the digest of each task, in a dict per task."""
  return [
    {**vars(task), "digest": task_set.digests[task.name]}
    for task in task_set.describe()
  ]


def _tasks_json(service: Service) -> dict[str, Any]:
  task_set, backbone = service.predictor.task_set, service.predictor.backbone
  tasks = [
    {**task, "kind": {"name": task["kind"].name}}
    for task in _described(task_set)
  ]
  for task in tasks:
    del task["class_names"]  # some tasks have thousands of class names
  return {
    "task_set": task_set_json(task_set),
    "tasks": tasks,
    "backbone": {
      "variant": backbone.id.variant,
      "image_size": backbone.id.image_size,
      "fingerprint": backbone.id.fingerprint,
      "dtype": backbone.config.dtype,
      "classes": backbone.config.num_classes,
    },
    "changes": service.token.is_set and not service.refuse_changes,
    "max_images": service.settings.max_images,
  }

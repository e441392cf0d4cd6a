"""What OpenAPI says of the routes: bodies, answers, examples."""

from __future__ import annotations

from typing import Any

from memory_vit.serving.schemas import (
  AttentionAnswer,
  ChangeAnswer,
  PredictAnswer,
  PredictBody,
  Problem,
  ServedTask,
  TaskPath,
  TasksAnswer,
  UnknownTaskProblem,
)

_Responses = dict[int | str, dict[str, Any]]

DESCRIPTION = (
  "Many image classification tasks in one pass of one frozen Vision "
  "Transformer. Tasks can be added and removed while it runs; every answer "
  "names the set of tasks that gave it."
)


def _problem(about: str) -> dict[str, Any]:
  return {"model": Problem, "description": about}


_BODIES: _Responses = {
  408: _problem("The body arrived too slowly."),
  413: _problem("The body is too large, or has too many images."),
  415: _problem("The body is of another type."),
}
_BUSY = _problem("Busy, warming up or stopping; see Retry-After.")

HEALTH: _Responses = {500: {"description": "The warm-up failed."}}
READY: _Responses = {503: {"description": "Warming up, or stopping."}}
METRICS: _Responses = {
  200: {"content": {"text/plain": {}}, "description": "Metrics."}
}
PREDICT: _Responses = {
  200: {
    "model": PredictAnswer,
    "description": "The answers, in the order of the images. An image that "
    "cannot be read has an error in its place.",
  },
  400: _problem("The body is cut, or x-min-version is no version."),
  404: {
    "model": UnknownTaskProblem,
    "description": "A task that was asked for is not there.",
  },
  422: _problem("No image can be read, or the body does not fit."),
  503: _BUSY,
  504: _problem("It took too long."),
  **_BODIES,
}
ATTENTION: _Responses = {
  **PREDICT,
  200: {"model": AttentionAnswer, "description": "The weights of attention."},
}
TASKS: _Responses = {
  200: {"model": TasksAnswer, "description": "The tasks that answer now."}
}
TASK: _Responses = {
  200: {"model": ServedTask, "description": "The task."},
  404: {
    "model": UnknownTaskProblem,
    "description": "There is no task of this name.",
  },
}
CHANGE: _Responses = {
  200: {"model": ChangeAnswer, "description": "What was changed."},
  201: {"model": ChangeAnswer, "description": "The task was added."},
  401: _problem("No token was sent, or another one."),
  403: _problem("The server allows no changes, or no paths."),
  500: _problem("The folder of tasks cannot be read or written."),
  507: _problem("The disk is full."),
  404: _problem("There is no task of this name."),
  409: _problem("Another task reads this one."),
  422: _problem("The name or the task cannot be used."),
  503: _BUSY,
  **_BODIES,
}

_FORM = {
  "type": "object",
  "required": ["images"],
  "properties": {
    "images": {
      "type": "array",
      "items": {"type": "string", "format": "binary"},
      "description": "image files: JPEG, PNG, WebP, BMP, GIF",
    },
    "tasks": {
      "type": "string",
      "description": "names of tasks, separated by commas; without it, all",
      "examples": ["birds,pets"],
    },
    "top": {"type": "integer", "minimum": 1},
    "original": {"type": "boolean"},
  },
}


def _inline(model: Any) -> dict[str, Any]:
  """The JSON schema of a model, with its parts in their places."""
  schema: dict[str, Any] = model.model_json_schema()
  parts = schema.pop("$defs", {})

  def resolved(value: Any) -> Any:
    if isinstance(value, dict):
      if "$ref" in value:
        return resolved(parts[value["$ref"].rpartition("/")[2]])
      return {key: resolved(inner) for key, inner in value.items()}
    if isinstance(value, list):
      return [resolved(inner) for inner in value]
    return value

  found: dict[str, Any] = resolved(schema)
  return found


PREDICT_BODY: dict[str, Any] = {
  "parameters": [
    {
      "name": "x-min-version",
      "in": "header",
      "schema": {"type": "integer", "minimum": 0},
      "description": "Version of the set of tasks that is waited for.",
    }
  ],
  "requestBody": {
    "required": True,
    "content": {
      "multipart/form-data": {"schema": _FORM},
      "application/json": {"schema": _inline(PredictBody)},
    },
  },
}
TASK_BODY: dict[str, Any] = {
  "requestBody": {
    "required": True,
    "content": {
      "application/octet-stream": {
        "schema": {"type": "string", "format": "binary"}
      },
      "application/json": {"schema": _inline(TaskPath)},
    },
  },
}

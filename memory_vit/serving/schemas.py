"""The JSON of requests and answers, for checking them and for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from memory_vit.serving.settings import MOST_IMAGES

# A PNG of one red pixel, for the examples.
_RED_PIXEL = (
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLv"
  "AAAAAElFTkSuQmCC"
)
MOST_TOP = 2**20
MOST_TASKS = 1_024
# For messages.
IMAGES_SHAPE = '{"images": [{"name": "a.jpg", "data": BASE64}]}'


class _Strict(BaseModel):
  """An object without other keys than those that are declared."""

  model_config = ConfigDict(extra="forbid")


class ImageData(_Strict):
  """An image file in base64, under a name that comes back in the answer."""

  name: str = Field(default="", max_length=1_000)
  data: str = Field(description="the file in base64: JPEG, PNG, WebP, BMP, GIF")


class PredictBody(_Strict):
  """Images to predict, the tasks to answer by, and how much to tell."""

  model_config = ConfigDict(
    extra="forbid",
    json_schema_extra={
      "examples": [
        {
          "images": [{"name": "a.png", "data": _RED_PIXEL}],
          "tasks": ["birds"],
          "top": 3,
        }
      ]
    },
  )
  # The first bad entry ends it: a million of them would fill the memory.
  images: Annotated[list[ImageData], FailFast()] = Field(
    min_length=1, max_length=MOST_IMAGES
  )
  tasks: list[str] | None = Field(
    default=None,
    min_length=1,
    max_length=MOST_TASKS,
    description="names of tasks; without it, all",
  )
  top: int | None = Field(
    default=None, ge=1, le=MOST_TOP, description="classes of each task"
  )
  original: bool = Field(
    default=False, description="whether the backbone's own head answers too"
  )


class TaskPath(_Strict):
  """A task that lies on the server, below its --task_root."""

  model_config = ConfigDict(
    extra="forbid",
    json_schema_extra={"examples": [{"path": "runs/mine/tasks/birds"}]},
  )
  path: str = Field(min_length=1, max_length=4_000)


class TaskSetName(BaseModel):
  """Which set of tasks answered; its version grows by 1 with each change."""

  version: int
  names: list[str]
  digest: str = Field(
    description="SHA-256 of the names, values and classes of the tasks"
  )


class GuessedClass(BaseModel):
  """A class, by its name (or its index, as text), and its probability."""

  model_config = ConfigDict(
    json_schema_extra={
      "examples": [{"class": "heron", "index": 17, "probability": 0.93}]
    },
  )
  class_name: str = Field(alias="class")
  index: int
  probability: float


class PredictedImage(BaseModel):
  """What the tasks say of an image; or only why it could not be read."""

  name: str
  tasks: dict[str, list[GuessedClass]] | None = None
  original: list[GuessedClass] | None = None
  task_errors: dict[str, str] | None = Field(
    default=None, description="tasks, or the backbone, that have no answer"
  )
  error: str | None = None


class PredictAnswer(BaseModel):
  """One set of tasks answered all images of a request."""

  task_set: TaskSetName
  images: list[PredictedImage]


class Attention(BaseModel):
  """Where the token of a task looks, in each of l layers.

  The weights of a layer sum to 1: `patches`, row by row, `class_token` (and
  registers), and the rest, on its own memory and the tokens of tasks.
  """

  class_token: list[float]
  patches: list[list[float]]
  rest: list[float]


class AttentionAnswer(BaseModel):
  """Where tasks look in one image, and the image as the model sees it."""

  task_set: TaskSetName
  view: str = Field(description="the prepared image, as the URL of a PNG")
  rows: int
  columns: int
  tasks: dict[str, Attention]


class ServedTask(BaseModel):
  """One task that answers now; its classes are named where it is asked for."""

  name: str
  slot: int
  classes: int
  class_names: list[str] | None = None
  cells: int
  regime: str
  parents: list[str]
  digest: str
  fingerprint: str


class TasksAnswer(BaseModel):
  """The tasks that answer now, and the backbone under them."""

  task_set: TaskSetName
  tasks: list[ServedTask]
  backbone: dict[str, Any]
  changes: bool = Field(description="whether a token lets tasks be changed")
  max_images: int = Field(description="images of one request, at most")


class ChangeAnswer(BaseModel):
  """A change of the set of tasks, which requests see from now on."""

  action: str
  name: str
  task_set: TaskSetName
  grew: bool = Field(description="whether programs had to be compiled for it")
  compiled: int


class Problem(BaseModel):
  """Why a request was refused, in one line."""

  model_config = ConfigDict(extra="allow")
  error: str
  known: list[str] | None = Field(
    default=None, description="of status 404: names of the tasks that answer"
  )


# Answers of routes that are refused, and of those that change a task.
REFUSED: dict[int | str, dict[str, Any]] = {
  "default": {"model": Problem, "description": "The request is refused."}
}
CHANGED: dict[int | str, dict[str, Any]] = {
  **REFUSED,
  201: {"model": ChangeAnswer, "description": "The task was added."},
}


def _predict_body() -> dict[str, Any]:
  """Both bodies of a prediction, which have the same keys."""
  body = PredictBody.model_json_schema()
  body["properties"]["images"]["items"] = body.pop("$defs")["ImageData"]
  form = {
    **body["properties"],
    "images": {
      "type": "array",
      "items": {"type": "string", "format": "binary"},
      "description": "image files: JPEG, PNG, WebP, BMP, GIF",
    },
    "tasks": {
      "type": "string",
      "description": "names of tasks, separated by commas; without it, all",
    },
  }
  return {
    "multipart/form-data": {
      "schema": {"type": "object", "required": ["images"], "properties": form}
    },
    "application/json": {"schema": body},
  }


# For OpenAPI, of routes that read their body without FastAPI.
PREDICT_BODY = {
  "parameters": [
    {
      "name": "x-min-version",
      "in": "header",
      "schema": {"type": "integer", "minimum": 0},
      "description": "Version of the set of tasks that is waited for.",
    }
  ],
  "requestBody": {"required": True, "content": _predict_body()},
}
TASK_BODY = {
  "requestBody": {
    "required": True,
    "content": {
      "application/octet-stream": {
        "schema": {"type": "string", "format": "binary"}
      },
      "application/json": {"schema": TaskPath.model_json_schema()},
    },
  }
}

"""The JSON of requests and answers, for validation and for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter

from memory_vit.serving.settings import MOST_IMAGES, MOST_OUTPUTS

# PNG file of one red pixel, in base64.
_RED_PIXEL = (
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLv"
  "AAAAAElFTkSuQmCC"
)
MOST_TASKS = 1_024
MOST_WEIGHTS = 2**20  # attention weights per answer: about 9 MiB of JSON
IMAGES_SHAPE = '{"images": [{"name": "a.jpg", "data": BASE64}]}'


# pydantic writes JSON five times as fast as `json`; both block other threads.
json_bytes = TypeAdapter(Any).dump_json


class _Strict(BaseModel):
  model_config = ConfigDict(extra="forbid")


class ImageData(_Strict):
  """An image file in base64, and a name that is repeated in the answer."""

  name: str = Field(default="", max_length=1_000)
  data: str = Field(
    description="A JPEG, PNG, WebP, BMP or GIF file, in base64."
  )


class PredictBody(_Strict):
  """Images, the tasks that answer, and how many classes or labels to return."""

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
  # FailFast stops at the first bad entry: a million errors would fill the RAM.
  images: Annotated[list[ImageData], FailFast()] = Field(
    min_length=1, max_length=MOST_IMAGES
  )
  tasks: list[str] | None = Field(
    default=None,
    min_length=1,
    max_length=MOST_TASKS,
    description="Names of tasks; by default all tasks.",
  )
  top: int | None = Field(
    default=None,
    ge=1,
    le=MOST_OUTPUTS,
    description="Maximum number of classes or labels per task and image; by "
    "default --top classes, or all labels at or above their thresholds. An "
    f"answer has at most {MOST_OUTPUTS:,} classes, labels and values in all.",
  )
  original: bool = Field(
    default=False,
    description="Whether to also return classes of the backbone's own head.",
  )


class TaskPath(_Strict):
  """A task on the server's disk, below its --task_root."""

  model_config = ConfigDict(
    extra="forbid",
    json_schema_extra={"examples": [{"path": "runs/mine/tasks/birds"}]},
  )
  path: str = Field(min_length=1, max_length=4_000)


class TaskSetName(BaseModel):
  """The set of tasks that answered; equal digests mean equal tasks."""

  digest: str
  tasks: dict[str, str] = Field(
    description="{name: digest of the task's parameters, classes and kind}."
  )


class GuessedClass(BaseModel):
  """A class: its name (or its index as text), index and probability."""

  model_config = ConfigDict(
    json_schema_extra={
      "examples": [{"class": "heron", "index": 17, "probability": 0.93}]
    },
  )
  class_name: str = Field(alias="class")
  index: int
  probability: float


class JudgedClasses(BaseModel):
  """Most probable classes, and whether the image belongs to no known class."""

  classes: list[GuessedClass]
  unknown: bool = Field(
    description="Whether the image belongs to none of the classes: its "
    "known_score is below the threshold of the task."
  )
  known_score: float = Field(description="The largest logit.")


class PredictedLabel(BaseModel):
  """A label: its name (or its index as text), index and probability."""

  label: str
  index: int
  probability: float


class PredictedLabels(BaseModel):
  """Labels at or above their thresholds, the most probable first."""

  labels: list[PredictedLabel]


class PredictedValue(BaseModel):
  """A value: its name (or its index as text), number and unit."""

  name: str
  value: float
  unit: str = Field(description="Empty if the value has no unit.")


class PredictedValues(BaseModel):
  """All values of a task, in the task's order."""

  values: list[PredictedValue]


class PredictedImage(BaseModel):
  """The answers of all tasks to an image, or why the image cannot be read."""

  name: str
  tasks: (
    dict[
      str,
      list[GuessedClass] | JudgedClasses | PredictedLabels | PredictedValues,
    ]
    | None
  ) = Field(
    default=None,
    description="{name: most probable classes, labels or values, depending on "
    "the kind of the task}.",
  )
  original: list[GuessedClass] | None = None
  task_errors: dict[str, str] | None = Field(
    default=None,
    description="{name: why this task, or the backbone, has no answer}.",
  )
  error: str | None = None


class PredictAnswer(BaseModel):
  """The answers to all images of a request, all from one set of tasks."""

  task_set: TaskSetName
  images: list[PredictedImage] = Field(
    description=f"Requests for more than {MOST_OUTPUTS:,} classes, labels and "
    "values in all are refused with status 413."
  )


class Attention(BaseModel):
  """Attention weights of the token of a task, in each of l layers.

  In each layer the weights sum to 1 over `patches` (row by row), `class_token`
  (with registers) and `rest` (memory cells and tokens of tasks).
  """

  class_token: list[float]
  patches: list[list[float]]
  rest: list[float]


class AttentionAnswer(BaseModel):
  """Attention of tasks in one image, and the image as the model sees it."""

  task_set: TaskSetName
  view: str = Field(description="The prepared image, as a data URL (PNG).")
  rows: int
  columns: int
  tasks: dict[str, Attention] = Field(
    description=f"Requests for more than {MOST_WEIGHTS:,} weights in all are "
    "refused with status 413."
  )


class ServedKind(BaseModel):
  """The kind of a task's outputs: "classes", "labels" or "values"."""

  name: str
  thresholds: list[float] | None = Field(
    default=None,
    description="The minimum probability at which each label is predicted; "
    "empty if all are 0.5.",
  )
  mean: list[float] | None = None
  std: list[float] | None = None
  units: list[str] | None = None
  temperature: float = Field(
    default=1.0,
    description="Divides outputs before they are turned into probabilities.",
  )
  unknown: float | None = Field(
    default=None,
    description="An image with a known_score below it belongs to no class.",
  )


class ServedTask(BaseModel):
  """A task that answers now; `GET /v1/tasks` omits some of its details."""

  name: str
  slot: int
  classes: int = Field(description="Number of outputs of the task.")
  kind: ServedKind
  class_names: list[str] | None = None
  cells: int
  regime: str
  parents: list[str]
  digest: str
  fingerprint: str


class TasksAnswer(BaseModel):
  """The tasks that answer now, and their backbone."""

  task_set: TaskSetName
  tasks: list[ServedTask]
  backbone: dict[str, Any]
  changes: bool = Field(
    description="Whether a client with the token can change tasks."
  )
  max_images: int = Field(description="Maximum number of images per request.")


class ChangeAnswer(BaseModel):
  """A completed change of tasks, which is in effect on this server."""

  action: str
  name: str
  digest: str = Field(
    description="Digest of the new or removed task; empty if a removed task "
    "did not answer."
  )
  grew: bool = Field(
    description="Whether the new tasks run other programs than the old tasks."
  )
  compiled: int


class Problem(BaseModel):
  """Why a request was refused, in one line."""

  model_config = ConfigDict(extra="allow")
  error: str
  known: list[str] | None = Field(
    default=None,
    description="With status 404: the names of the tasks that answer.",
  )


REFUSED: dict[int | str, dict[str, Any]] = {
  "default": {"model": Problem, "description": "The request is refused."}
}
CHANGED: dict[int | str, dict[str, Any]] = {
  **REFUSED,
  201: {"model": ChangeAnswer, "description": "The task was added."},
}


def _predict_body() -> dict[str, Any]:
  body = PredictBody.model_json_schema()
  body["properties"]["images"]["items"] = body.pop("$defs")["ImageData"]
  form = {
    **body["properties"],
    "images": {
      "type": "array",
      "items": {"type": "string", "format": "binary"},
      "description": "Image files: JPEG, PNG, WebP, BMP or GIF.",
    },
    "tasks": {
      "type": "string",
      "description": "Names of tasks, separated by commas; by default all.",
    },
  }
  return {
    "multipart/form-data": {
      "schema": {"type": "object", "required": ["images"], "properties": form}
    },
    "application/json": {"schema": body},
  }


# OpenAPI descriptions of bodies that routes parse themselves, without FastAPI.
PREDICT_BODY = {
  "parameters": [
    {
      "name": "x-wait-for",
      "in": "header",
      "schema": {"type": "string"},
      "description": "NAME=DIGEST waits until the task with this digest "
      "answers; NAME=none waits until the task no longer answers.",
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

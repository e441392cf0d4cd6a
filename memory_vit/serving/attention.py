"""Attention maps for the page of the server."""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from memory_vit.errors import DataError
from memory_vit.images.view import to_levels
from memory_vit.looking.token_attention import token_attention_program
from memory_vit.prediction.compilations import CompilationCounter
from memory_vit.serving.answering import task_set_json, unknown_tasks
from memory_vit.serving.predict_requests import PredictRequest
from memory_vit.serving.request_error import RequestError, busy
from memory_vit.serving.schemas import MOST_WEIGHTS, json_bytes
from memory_vit.tasks.program import encode

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor
  from memory_vit.tasks.slots import Slots

# Maximum number of unanswered requests; each request has one image.
_MOST_WAITING = 8
_DIGITS = 6


class AttentionService:
  """Computes attention maps of tasks, for one image at a time."""

  def __init__(self, predictor: Predictor, timeout: float) -> None:
    """`timeout` is in seconds."""
    self._predictor = predictor
    self._timeout = timeout
    self._waiting = 0
    self._counter = CompilationCounter()
    self._compiled: Hashable = None  # shapes of the compiled programs
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="attention")

  @property
  def compilations(self) -> int:
    """Number of programs compiled by requests; warm-ups do not count."""
    return self._counter.count

  @property
  def is_warm(self) -> bool:
    """Whether the attention programs fit the current tasks."""
    return self._compiled == self._predictor.task_set.program.shapes

  async def warm_up(self) -> None:
    """Compile the programs, so that the first request does not wait."""
    # Use the thread that answers requests: a request then waits until the
    # warm-up ends, instead of compiling the same programs itself.
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(self._thread, self._compile)

  def _compile(self) -> None:
    side = self._predictor.backbone.config.image_size
    grey = np.zeros((side, side, 3), np.float32)
    program = self._predictor.task_set.program
    if program.slots and program.slots.arrays.mask is not None:
      self._weights(grey, program.slots)
    self._compiled = program.shapes

  async def answer(self, request: PredictRequest) -> bytes:
    """Return JSON of what tasks attend to in the single image of a request.

    Raise status 404 for unknown tasks; 422 for options of /v1/predict, or for
    anything but one readable image; 413 for too many tasks; 503 if too many
    requests wait; 504 after the timeout.
    """
    if len(request.images) != 1:
      raise RequestError(422, "images: expected exactly one image.")
    if request.top is not None or request.original:
      raise RequestError(
        422, "top and original apply to /v1/predict only: leave them out."
      )
    if self._waiting >= _MOST_WAITING:
      raise busy(f"{self._waiting} images wait already: try again later.", 2)
    self._waiting += 1
    loop = asyncio.get_running_loop()
    try:
      async with asyncio.timeout(self._timeout):
        return await loop.run_in_executor(self._thread, self._compute, request)
    except TimeoutError:
      raise RequestError(
        504, f"no answer within {self._timeout:g} seconds."
      ) from None
    finally:
      self._waiting -= 1

  def close(self) -> None:
    self._thread.shutdown(wait=False, cancel_futures=True)

  def _compute(self, request: PredictRequest) -> bytes:
    task_set = self._predictor.task_set
    with_token = [s.name for s in task_set.specs if s.learned.has_token]
    names = request.tasks or with_token or task_set.names
    unknown = [name for name in names if name not in task_set.names]
    if unknown:
      raise unknown_tasks(unknown, task_set.names)
    if not names:
      raise RequestError(
        422, "there is no task whose attention could be shown."
      )
    for spec in map(task_set.spec, names):
      if spec.name not in with_token:
        raise RequestError(
          422,
          f"task {spec.name!r} has the regime {spec.regime!r}, which has no "
          "token: there is no attention to show.",
        )
    slots = task_set.program.slots
    assert slots is not None  # each task with a token is in a slot
    self._require_few(len(names))
    [uploaded] = request.images
    [pixels] = self._predictor.prepare_each([uploaded.content])
    if uploaded.error or isinstance(pixels, DataError):
      raise RequestError(422, uploaded.error or str(pixels))
    side = math.isqrt(self._predictor.backbone.config.num_patches)
    with self._counter.counting():
      image = self._weights(pixels, slots)
    about = json_bytes(
      {
        "task_set": task_set_json(task_set),
        "view": _png_url(pixels),
        "rows": side,
        "columns": side,
      }
    )
    # `json_bytes` blocks other threads, so call it for one task at a time.
    tasks = b",".join(
      json_bytes(name)
      + b":"
      + json_bytes(_shares(image[task_set.slots[name]], side * side))
      for name in names
    )
    return about[:-1] + b',"tasks":{' + tasks + b"}}"

  def _require_few(self, tasks: int) -> None:
    config = self._predictor.backbone.config
    weights = config.depth * (config.num_patches + 2)
    if tasks * weights > MOST_WEIGHTS:
      raise RequestError(
        413,
        f"the attention of {tasks} tasks has {tasks * weights:,} weights, "
        f"expected at most {MOST_WEIGHTS:,}: name at most "
        f"{MOST_WEIGHTS // weights} tasks.",
      )

  def _weights(self, pixels: np.ndarray, slots: Slots) -> np.ndarray:
    """Return attention weights (slots t, layers l, image tokens s)."""
    backbone = self._predictor.backbone
    _, context = encode(backbone, pixels[None])
    image, _, _ = token_attention_program(
      backbone.params,
      slots.arrays._replace(heads=None),
      context,
      config=backbone.config,
      per_head=False,
    )
    return np.asarray(image)[0]


def _shares(weights: np.ndarray, patches: int) -> dict[str, Any]:
  """Return {kind of token: weights by layer}.

  "rest" is 1 minus the sum of the other weights of a layer, or 0 if negative.
  """
  patch = weights[:, -patches:].astype(np.float64)
  class_token = weights[:, :-patches].sum(axis=1, dtype=np.float64)
  rest = np.maximum(1 - patch.sum(axis=1) - class_token, 0)
  return {
    "class_token": np.round(class_token, _DIGITS).tolist(),
    "patches": np.round(patch, _DIGITS).tolist(),
    "rest": np.round(rest, _DIGITS).tolist(),
  }


def _png_url(pixels: np.ndarray) -> str:
  """Encode an image, float32 (side, side, 3) in [-1, 1], as a PNG data URL."""
  file = io.BytesIO()
  Image.fromarray(to_levels(pixels)).save(file, "PNG")
  encoded = base64.b64encode(file.getvalue()).decode("ascii")
  return f"data:image/png;base64,{encoded}"

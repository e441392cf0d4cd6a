"""Answer predict requests: decode images, batch them, and write JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from memory_vit.errors import DataError, TaskError
from memory_vit.images import decoding
from memory_vit.kinds.kind import Most
from memory_vit.model.task import BACKBONE
from memory_vit.runtime.messages import brief, one_line
from memory_vit.serving.batcher import Batcher
from memory_vit.serving.lanes import HEAVY_THREADS, Lanes, is_heavy
from memory_vit.serving.metrics import Metrics
from memory_vit.serving.predict_requests import PredictRequest
from memory_vit.serving.request_error import RequestError
from memory_vit.serving.schemas import json_bytes
from memory_vit.serving.settings import MOST_OUTPUTS, ServerSettings

if TYPE_CHECKING:
  from memory_vit.prediction import Predictions, Predictor, TaskSet

# On a CPU, images should fill at least this fraction of a batch, since padding
# takes as much time as images. On an accelerator, padding is nearly free.
_LEAST_FILL_ON_CPU = 0.75
# Sorting, naming and writing one output takes as long as decoding ten pixels.
_PIXELS_PER_OUTPUT = 10


class Answering:
  """Answers predict requests; must be created and used in one event loop."""

  def __init__(
    self, predictor: Predictor, settings: ServerSettings, metrics: Metrics
  ) -> None:
    self._predictor = predictor
    self._settings = settings
    self._metrics = metrics
    self._lanes = Lanes()
    self._batcher: Batcher[Predictions] = Batcher(
      self._predict,
      # `compiled_sizes` is empty until the first batch size is compiled.
      sizes=lambda: predictor.compiled_sizes or predictor.batch_sizes,
      least_fill=_LEAST_FILL_ON_CPU if jax.default_backend() == "cpu" else 0,
      wait_seconds=settings.wait_ms / 1e3,
      max_queue=settings.max_queue,
      on_batch=metrics.batch,
    )

  @property
  def taken(self) -> int:
    """Number of images that were accepted and are not yet answered."""
    return self._batcher.taken

  async def answer(self, request: PredictRequest) -> bytes:
    """Answer all images of a request with one set of tasks; return JSON."""
    # Refuse unknown tasks early; `_work` checks again, in case tasks change.
    self._require_known(request, self._predictor.task_set)
    try:
      # A timeout cancels queued work, but not work that a thread has begun.
      async with asyncio.timeout(self._settings.timeout):
        prepared, answer = await self._work(request)
    except RequestError as refusal:
      self._metrics.images(0, len(refusal.more.get("images", ())))
      raise
    except TimeoutError:
      raise RequestError(
        504,
        f"no answer within {self._settings.timeout:g} seconds: the server is "
        "overloaded, or the images are very large.",
      ) from None
    # Count images here, to leave out requests that timed out or were cancelled.
    refused = sum(isinstance(result, DataError) for result in prepared)
    self._metrics.images(len(prepared) - refused, refused)
    return answer

  def close(self) -> None:
    self._batcher.close()
    self._lanes.close()

  async def _work(
    self, request: PredictRequest
  ) -> tuple[list[np.ndarray | DataError], bytes]:
    weight = await self._weight(request)
    heavy = is_heavy(weight)
    with self._batcher.room(len(request.images), heavy=heavy):
      with contextlib.nullcontext() if heavy else self._lanes.light_request():
        prepared, answer, rows = await self._predicted(request, weight)
      self._require_known(request, answer.task_set)
      predictions = _own_part(answer, rows, request)
      outputs = sum(logits.size for logits in predictions.logits.values())
      make = functools.partial(self._json, request, prepared, predictions)
      json = await self._lanes.run(_PIXELS_PER_OUTPUT * outputs, make)
    return prepared, json

  async def _predicted(
    self, request: PredictRequest, weight: int
  ) -> tuple[list[np.ndarray | DataError], Predictions, slice]:
    """Return (pixels or error of each image, outputs of a batch, slice).

    The batch may hold rows of other requests: the slice selects the rows of
    `request`.
    """
    while True:
      wanted = self._predictor.preprocessing
      prepared = await self._prepared(request, weight)
      good = [result for result in prepared if isinstance(result, np.ndarray)]
      if not good:
        raise _no_image(request, prepared)
      answer, rows = await self._batcher.submit(np.stack(good))
      # The tasks may have changed meanwhile. If they now need another
      # preprocessing, do not return: the loop prepares the images again.
      if answer.task_set.preprocessing == wanted:
        return prepared, answer, rows

  async def _weight(self, request: PredictRequest) -> int:
    """Return the pixel count of a request, weighted by decoding time.

    Raise status 413 if the weighted count is too large.
    """
    encoded = [image.content for image in request.images]
    pixels = await self._lanes.run(
      sum(map(len, encoded)) // 3,
      lambda: [*map(decoding.pixels_claimed, encoded)],
    )
    _require_few_pixels(sum(pixels), self._settings.max_megapixels)
    return sum(pixels)

  async def _prepared(
    self, request: PredictRequest, weight: int
  ) -> list[np.ndarray | DataError]:
    """Return, per image, an array float32 (side, side, 3) or a `DataError`."""
    encoded = [image.content for image in request.images if not image.error]
    heavy = is_heavy(weight)
    # Split a heavy request, so that lighter requests can run between its parts.
    step = HEAVY_THREADS if heavy else max(1, len(encoded))
    results: list[np.ndarray | DataError] = []
    for first in range(0, len(encoded), step):
      prepare = functools.partial(
        self._predictor.prepare_each,
        encoded[first : first + step],
        first,
        large=heavy,
      )
      results += await self._lanes.run(weight, prepare)
    remaining = iter(results)
    return [
      DataError(image.error) if image.error else next(remaining)
      for image in request.images
    ]

  def _predict(self, pixels: np.ndarray) -> Predictions:
    has_head = bool(self._predictor.backbone.config.num_classes)
    return self._predictor.predict_pixels(pixels, original=has_head)

  def _require_known(self, request: PredictRequest, task_set: TaskSet) -> None:
    known = set(task_set.names)
    unknown = [name for name in request.tasks or () if name not in known]
    if unknown:
      raise unknown_tasks(unknown, task_set.names)
    if request.original and not self._predictor.backbone.config.num_classes:
      raise RequestError(
        422, "original is true, but the backbone of this server has no head."
      )

  def _json(
    self,
    request: PredictRequest,
    prepared: Sequence[np.ndarray | DataError],
    answer: Predictions,
  ) -> bytes:
    rows = sum(isinstance(result, np.ndarray) for result in prepared)
    answers_of_rows = iter(self._answers(answer, rows, request))
    return json_bytes(
      {
        "task_set": task_set_json(answer.task_set),
        "images": [
          {"name": image.name, **next(answers_of_rows)}
          if isinstance(result, np.ndarray)
          else {"name": image.name, "error": one_line(str(result))}
          for image, result in zip(request.images, prepared, strict=True)
        ],
      }
    )

  def _answers(
    self, answer: Predictions, rows: int, request: PredictRequest
  ) -> list[dict[str, Any]]:
    """For each readable image, return an object of answers and task errors."""
    names = (*answer.logits, *([BACKBONE] if request.original else []))
    activated, problems = _activated(answer, names)
    most = Most(request.top or self._settings.top, request.top)
    kinds = {name: answer.kind(name) for name in activated}
    _require_few_outputs(
      rows * len(problems)
      + sum(
        kinds[name].kind.number_of_answers(kinds[name], outputs, most)
        for name, outputs in activated.items()
      )
    )
    answers = {
      name: answer.marked(
        name, kinds[name].answers(answer.class_names(name), outputs, most)
      )
      for name, outputs in activated.items()
    }
    original = answers.pop(BACKBONE, None)
    return [
      {
        "tasks": {name: of_task[i] for name, of_task in answers.items()},
        **({"original": original[i]} if original else {}),
        **({"task_errors": problems} if problems else {}),
      }
      for i in range(rows)
    ]


def _own_part(
  answer: Predictions, rows: slice, request: PredictRequest
) -> Predictions:
  """Select the rows and tasks of a request from the outputs of its batch."""
  return dataclasses.replace(
    answer,
    logits={
      name: answer.logits[name][rows] for name in request.tasks or answer.logits
    },
    original=None if answer.original is None else answer.original[rows],
    features=None,
  )


def _activated(
  answer: Predictions, names: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Return ({name: probabilities or values}, {name of failed task: error})."""
  activated, problems = {}, {}
  for name in names:
    try:  # non-finite outputs of one task must not affect other tasks
      activated[name] = answer.activated(name)
    except TaskError as error:
      problems[name] = one_line(str(error))
  return activated, problems


def _require_few_outputs(count: int) -> None:
  if count > MOST_OUTPUTS:
    raise RequestError(
      413,
      f"the answer would have {count:,} classes, labels and values, summed "
      f"over all images and tasks, expected at most {MOST_OUTPUTS:,}: send "
      "fewer images, name fewer tasks, or give a smaller top.",
    )


def _require_few_pixels(pixels: int, most: float) -> None:
  """Raise 413 if `pixels`, a weighted count, exceeds `most` megapixels."""
  if pixels > most * 1e6:
    raise RequestError(
      413,
      f"the images count as {pixels / 1e6:.0f} megapixels together, expected "
      f"at most {most:g}: send smaller images, or several requests.",
    )


def task_set_json(task_set: TaskSet) -> dict[str, Any]:
  return {"digest": task_set.digest, "tasks": task_set.digests}


def unknown_tasks(unknown: Sequence[str], known: Sequence[str]) -> RequestError:
  return RequestError(
    404,
    f"there is no task {', '.join(map(brief, unknown[:8]))}; known "
    f"lists the names of all {len(known)} tasks.",
    known=list(known),
  )


def _no_image(
  request: PredictRequest, prepared: Sequence[np.ndarray | DataError]
) -> RequestError:
  reasons = [one_line(str(result)) for result in prepared]
  return RequestError(
    422,
    f"none of {len(reasons)} images can be read; the first: {reasons[0]}",
    images=[
      {"name": image.name, "error": reason}
      for image, reason in zip(request.images, reasons, strict=True)
    ],
  )

"""Answer the images of a request: decode, share a pass, pick answers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from memory_vit.errors import DataError, TaskError
from memory_vit.images import decoding
from memory_vit.images.reader import THREADS
from memory_vit.model.task import BACKBONE
from memory_vit.runtime.messages import brief, one_line
from memory_vit.serving.batcher import Batcher
from memory_vit.serving.metrics import Metrics
from memory_vit.serving.predict_requests import PredictRequest
from memory_vit.serving.request_error import RequestError
from memory_vit.serving.settings import ServerSettings

if TYPE_CHECKING:
  from memory_vit.prediction import Predictions, Predictor, TaskSet

# Requests that are decoded at the same time, each by threads of the predictor.
_DECODED_TOGETHER = 4
# Share of a batch from which the rest is padded: padding costs a CPU as much as
# images, and an accelerator next to nothing.
_LEAST_FILL_ON_CPU = 0.75
T = TypeVar("T")


class Answering:
  """Answers requests; is made and used within one event loop."""

  def __init__(
    self, predictor: Predictor, settings: ServerSettings, metrics: Metrics
  ) -> None:
    self._predictor = predictor
    self._settings = settings
    self._metrics = metrics
    self._decoders = ThreadPoolExecutor(_DECODED_TOGETHER, "decode")
    # Requests with large images wait only for each other.
    self._for_large = ThreadPoolExecutor(_DECODED_TOGETHER, "decode-large")
    self._batcher: Batcher[Predictions] = Batcher(
      self._predict,
      sizes=predictor.batch_sizes,
      least_fill=_LEAST_FILL_ON_CPU if jax.default_backend() == "cpu" else 0,
      wait_seconds=settings.wait_ms / 1e3,
      max_queue=settings.max_queue,
      on_batch=metrics.batch,
    )

  @property
  def taken(self) -> int:
    """Images that were taken and are not yet answered."""
    return self._batcher.taken

  async def answer(self, request: PredictRequest) -> dict[str, Any]:
    """Answer all images of a request by one set of tasks."""
    # Before decoding; the set that answers is asked again.
    self._require_known(request, self._predictor.task_set)
    deadline = time.monotonic() + self._settings.timeout
    count = len(request.images)
    # Its place in the queue is free once its threads are done, not before.
    work = asyncio.create_task(self._work(request, deadline))
    work.add_done_callback(_retrieve)
    try:
      async with asyncio.timeout(self._settings.timeout):
        answer = await asyncio.shield(work)
    except RequestError as refusal:
      self._metrics.images(0, len(refusal.more.get("images", ())))
      raise
    except TimeoutError:
      raise RequestError(
        504,
        f"no answer within {self._settings.timeout:g} seconds: the server is "
        "overloaded, or the images are very large.",
      ) from None
    # Only of requests that a client waited for to the end.
    refused = sum("error" in image for image in answer["images"])
    self._metrics.images(count - refused, refused)
    return answer

  def close(self) -> None:
    self._batcher.close()
    for decoders in (self._decoders, self._for_large):
      decoders.shutdown(wait=False, cancel_futures=True)

  async def _work(
    self, request: PredictRequest, deadline: float
  ) -> dict[str, Any]:
    with self._batcher.room(len(request.images)):
      while True:
        wanted = self._predictor.evaluation
        prepared = await self._prepared(request, deadline)
        good = [one for one in prepared if isinstance(one, np.ndarray)]
        if not good:
          raise _no_image(request, prepared)
        answer, rows = await self._batcher.submit(np.stack(good), deadline)
        # The first task of an empty set may prepare images differently.
        if answer.task_set.evaluation == wanted:
          break
    self._require_known(request, answer.task_set)
    # Many classes of many tasks must not block the event loop.
    answers_of_rows = iter(
      await asyncio.to_thread(self._answers, answer, rows, request)
    )
    return {
      "task_set": task_set_json(answer.task_set),
      "images": [
        {"name": image.name, **next(answers_of_rows)}
        if isinstance(one, np.ndarray)
        else {"name": image.name, "error": one_line(str(one))}
        for image, one in zip(request.images, prepared, strict=True)
      ],
    }

  async def _prepared(
    self, request: PredictRequest, deadline: float
  ) -> list[np.ndarray | DataError]:
    """Each image float32 (side, side, 3), or why it cannot be read."""

    encoded = [one.content for one in request.images if not one.error]

    def prepare(together: int) -> list[np.ndarray | DataError]:
      several: list[np.ndarray | DataError] = []
      for first in range(0, len(encoded), together):
        if time.monotonic() > deadline:  # the client has its 504
          raise TimeoutError
        part = encoded[first : first + together]
        several += self._predictor.prepare_each(part, first)
      found = iter(several)
      return [
        DataError(one.error) if one.error else next(found)
        for one in request.images
      ]

    pixels = await self._run(
      max(map(len, encoded), default=0) // 3,
      lambda: [*map(decoding.pixels_claimed, encoded)],
    )
    _require_few_pixels(sum(pixels), self._settings.max_megapixels)
    most = max(pixels, default=0)
    large = most >= decoding.LARGE_PIXELS
    # Large ones one by one, so that they end soon after the deadline.
    return await self._run(
      most, functools.partial(prepare, 1 if large else THREADS)
    )

  async def _run(self, pixels: int, work: Callable[[], T]) -> T:
    """Run work on images in the threads for the size of the largest."""
    large = pixels >= decoding.LARGE_PIXELS
    return await asyncio.get_running_loop().run_in_executor(
      self._for_large if large else self._decoders, work
    )

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
        422, "original: the backbone of this server has no head."
      )

  def _answers(
    self, answer: Predictions, rows: slice, request: PredictRequest
  ) -> list[dict[str, Any]]:
    """For each row: the answer of each task."""
    names = request.tasks or tuple(answer.logits)
    # Sort only the outputs of this request.
    own_rows = dataclasses.replace(
      answer,
      logits={name: answer.logits[name][rows] for name in names},
      original=None if answer.original is None else answer.original[rows],
      features=None,
    )
    top = request.top or self._settings.top
    found, problems = _all_answers(own_rows, names, top, request.original)
    original = found.pop(BACKBONE, None)
    return [
      {
        "tasks": {name: of_task[i] for name, of_task in found.items()},
        **({"original": original[i]} if original else {}),
        **({"task_errors": problems} if problems else {}),
      }
      for i in range(rows.stop - rows.start)
    ]


def _all_answers(
  answer: Predictions, names: Sequence[str], top: int, original: bool
) -> tuple[dict[str, list[Any]], dict[str, str]]:
  """The answers of each task, or why it has none."""
  found, problems = {}, {}
  for name in (*names, BACKBONE) if original else names:
    try:  # outputs that are not finite must not spoil those of other tasks
      found[name] = answer.answers(name, top)
    except TaskError as error:
      problems[name] = one_line(str(error))
  return found, problems


def _require_few_pixels(pixels: int, most: float) -> None:
  """By headers: a file of a few kilobytes can have many megapixels."""
  if pixels > most * 1e6:
    raise RequestError(
      413,
      f"the images have {pixels / 1e6:.0f} megapixels together, expected at "
      f"most {most:g}: send them in several requests, or smaller.",
    )


def task_set_json(task_set: TaskSet) -> dict[str, Any]:
  return {
    "version": task_set.version,
    "names": list(task_set.names),
    "digest": task_set.digest,
  }


def unknown_tasks(unknown: Sequence[str], known: Sequence[str]) -> RequestError:
  return RequestError(
    404,
    f"there is no task {', '.join(map(brief, unknown[:8]))}; there are "
    f"{len(known)}: see known.",
    known=list(known),
  )


def _no_image(
  request: PredictRequest, prepared: Sequence[np.ndarray | DataError]
) -> RequestError:
  reasons = [one_line(str(one)) for one in prepared]
  return RequestError(
    422,
    f"none of {len(reasons)} images can be read; the first: {reasons[0]}",
    images=[
      {"name": image.name, "error": reason}
      for image, reason in zip(request.images, reasons, strict=True)
    ],
  )


def _retrieve(work: asyncio.Task[Any]) -> None:
  """Retrieve an error that no request waits for, so that asyncio is silent."""
  if not work.cancelled():
    work.exception()

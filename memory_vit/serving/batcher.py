"""Dynamic batching: requests that arrive together share a pass.

All images of a request are in one batch, so that one set of tasks answers them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from memory_vit.serving.request_error import busy

T = TypeVar("T")
# Estimate for Retry-After until the first batch has been measured.
_SECONDS_PER_IMAGE = 0.05
_MOST_RETRY_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting(Generic[T]):
  """Queued request; `pixels` are its k images, float32 (k, side, side, 3)."""

  pixels: np.ndarray
  answer: asyncio.Future[tuple[T, slice]]
  since: float


class Batcher(Generic[T]):
  """Collects images of requests, and predicts batches of them in one thread."""

  def __init__(
    self,
    predict: Callable[[np.ndarray], T],
    *,
    sizes: Callable[[], Sequence[int]],
    least_fill: float,
    wait_seconds: float,
    max_queue: int,
    on_batch: Callable[[int, int, float], None] = lambda *_: None,
  ) -> None:
    """Start the worker; `sizes()` returns the batch sizes in ascending order.

    After a batch, `on_batch` gets (image count, count with padding, seconds).
    """
    self.taken = 0  # images without an answer yet
    self._heavy = 0  # how many of the `taken` images are from heavy requests
    self._predict = predict
    self._next_sizes = sizes
    self._sizes = tuple(sizes())
    self._least_fill = least_fill
    self._seconds_per_image = _SECONDS_PER_IMAGE
    self._wait_seconds = wait_seconds
    self._max_queue = max_queue
    self._on_batch = on_batch
    self._waiting: collections.deque[_Waiting[T]] = collections.deque()
    self._changed = asyncio.Event()
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="predict")
    self._worker = asyncio.create_task(self._work())

  @contextlib.contextmanager
  def room(self, count: int, *, heavy: bool = False) -> Iterator[None]:
    """Reserve room in the queue while the body runs, or raise status 503.

    One heavy request may fill the queue; two or more, only half of the queue.
    """
    is_full = self.taken + count > self._max_queue
    if heavy and self._heavy:
      is_full |= self._heavy + count > self._max_queue // 2
    if is_full:
      seconds = self.taken * self._seconds_per_image
      raise busy(
        f"{self.taken} images are waiting, and the queue holds at most "
        f"{self._max_queue}: try again later.",
        min(_MOST_RETRY_SECONDS, seconds),
      )
    self.taken += count
    self._heavy += count * heavy
    try:
      yield
    finally:
      self.taken -= count
      self._heavy -= count * heavy
      self._changed.set()

  async def submit(self, pixels: np.ndarray) -> tuple[T, slice]:
    """Return (answer to a batch, rows of these images); call within `room`."""
    loop = asyncio.get_running_loop()
    waiting = _Waiting[T](pixels, loop.create_future(), time.monotonic())
    self._waiting.append(waiting)
    self._changed.set()
    return await waiting.answer

  def close(self) -> None:
    """Stop; the server calls this after every request has its answer."""
    self._worker.cancel()
    self._thread.shutdown(wait=False, cancel_futures=True)

  async def _work(self) -> None:
    while True:
      while not self._waiting:
        self._changed.clear()
        await self._changed.wait()
      self._sizes = tuple(self._next_sizes())
      await self._gather()
      batch = self._take()
      if batch:
        await self._run(batch)

  async def _gather(self) -> None:
    """Wait up to `wait_seconds` for images that are being decoded."""
    until = self._waiting[0].since + self._wait_seconds
    while (left := until - time.monotonic()) > 0:
      ready = sum(len(waiting.pixels) for waiting in self._waiting)
      # Stop if the largest batch is full, or if all images are decoded.
      if ready >= min(self._sizes[-1], self.taken):
        return
      self._changed.clear()
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(left):
          await self._changed.wait()

  def _take(self) -> list[_Waiting[T]]:
    """Remove the requests of the next batch from the queue, oldest first."""
    alive = collections.deque(
      waiting
      for waiting in self._waiting
      if not waiting.answer.done()  # done: the request was cancelled
    )
    self._waiting = alive
    if not alive:
      return []
    batch: list[_Waiting[T]] = []
    room = self._batch_size([len(waiting.pixels) for waiting in alive])
    while alive and (not batch or len(alive[0].pixels) <= room):
      batch.append(alive.popleft())
      room -= len(batch[-1].pixels)
    return batch

  def _batch_size(self, waiting: Sequence[int]) -> int:
    """Return the size of the next batch, small enough to avoid much padding."""
    count = sum(waiting)
    size = self._holding(count)
    if count >= self._least_fill * size:
      return size
    # Use the largest batch size that the images fill. If this size is too small
    # for the oldest request, use the smallest size that holds that request.
    full = max((s for s in self._sizes if s <= count), default=0)
    return max(full, self._holding(waiting[0]))

  def _holding(self, count: int) -> int:
    """Return the smallest batch size >= `count`, or else the largest size."""
    return next((s for s in self._sizes if s >= count), self._sizes[-1])

  async def _run(self, batch: list[_Waiting[T]]) -> None:
    loop = asyncio.get_running_loop()
    count = sum(len(waiting.pixels) for waiting in batch)
    begun = time.monotonic()
    try:
      answer = await loop.run_in_executor(
        self._thread, self._predict_all, [waiting.pixels for waiting in batch]
      )
    except Exception as error:
      for waiting in batch:
        if not waiting.answer.done():
          waiting.answer.set_exception(error)
      return
    seconds = time.monotonic() - begun
    self._seconds_per_image = seconds / count
    full, rest = divmod(count, self._sizes[-1])
    rows = full * self._sizes[-1] + (self._holding(rest) if rest else 0)
    self._on_batch(count, rows, seconds)
    start = 0
    for waiting in batch:
      stop = start + len(waiting.pixels)
      if not waiting.answer.done():
        waiting.answer.set_result((answer, slice(start, stop)))
      start = stop

  def _predict_all(self, pixels: list[np.ndarray]) -> T:
    return self._predict(
      pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
    )

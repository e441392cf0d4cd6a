"""Dynamic batching: requests that arrive together share a pass.

All images of a request are in one call, and so answered by one set of tasks.
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
# Until the first batch was measured; for Retry-After alone.
_SECONDS_PER_IMAGE = 0.05
_MOST_RETRY_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting(Generic[T]):
  """Prepared images of a request: float32 (k, side, side, 3)."""

  pixels: np.ndarray
  answer: asyncio.Future[tuple[T, slice]]
  since: float


class Batcher(Generic[T]):
  """Collects images of requests, and runs them in batches in one thread."""

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
    """Start to work; `sizes` gives the ascending batch sizes of the next batch.

    `on_batch` gets images, rows with padding, and seconds.
    """
    self.taken = 0  # images without an answer yet
    self._heavy = 0  # those of heavy requests
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
    """Take images into the queue until the body ends, or raise status 503.

    Heavy requests together take at most half of the queue, or one of them all.
    """
    is_full = self.taken + count > self._max_queue
    if heavy and self._heavy:
      is_full |= self._heavy + count > self._max_queue // 2
    if is_full:
      seconds = self.taken * self._seconds_per_image
      raise busy(
        f"{self.taken} images are waiting, and there is room for "
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
    """Answer images that have `room`: the batch's answer, and their rows."""
    loop = asyncio.get_running_loop()
    one = _Waiting[T](pixels, loop.create_future(), time.monotonic())
    self._waiting.append(one)
    self._changed.set()
    return await one.answer

  def close(self) -> None:
    """End; the server closes it once every request has its answer."""
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
    """Wait for images that are being decoded, but not for long."""
    until = self._waiting[0].since + self._wait_seconds
    while (left := until - time.monotonic()) > 0:
      ready = sum(len(one.pixels) for one in self._waiting)
      if ready >= min(self._sizes[-1], self.taken):  # no other can come
        return
      self._changed.clear()
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(left):
          await self._changed.wait()

  def _take(self) -> list[_Waiting[T]]:
    """The requests of the next batch, the oldest first."""
    alive = collections.deque(
      one
      for one in self._waiting
      if not one.answer.done()  # else cancelled
    )
    self._waiting = alive
    if not alive:
      return []
    batch: list[_Waiting[T]] = []
    room = self._batch_size([len(one.pixels) for one in alive])
    while alive and (not batch or len(alive[0].pixels) <= room):
      batch.append(alive.popleft())
      room -= len(batch[-1].pixels)
    return batch

  def _batch_size(self, waiting: Sequence[int]) -> int:
    """The smallest size for all images, unless much would be padding."""
    count = sum(waiting)
    size = self._holding(count)
    if count >= self._least_fill * size:
      return size
    # The largest that is full, but at least what the oldest request needs.
    full = max((s for s in self._sizes if s <= count), default=0)
    return max(full, self._holding(waiting[0]))

  def _holding(self, count: int) -> int:
    """The smallest size for this number of images, or the largest of all."""
    return next((s for s in self._sizes if s >= count), self._sizes[-1])

  async def _run(self, batch: list[_Waiting[T]]) -> None:
    loop = asyncio.get_running_loop()
    count = sum(len(one.pixels) for one in batch)
    begun = time.monotonic()
    try:
      answer = await loop.run_in_executor(
        self._thread, self._predict_all, [one.pixels for one in batch]
      )
    except Exception as error:
      for one in batch:
        if not one.answer.done():
          one.answer.set_exception(error)
      return
    seconds = time.monotonic() - begun
    self._seconds_per_image = seconds / count
    full, rest = divmod(count, self._sizes[-1])
    rows = full * self._sizes[-1] + (self._holding(rest) if rest else 0)
    self._on_batch(count, rows, seconds)
    start = 0
    for one in batch:
      stop = start + len(one.pixels)
      if not one.answer.done():
        one.answer.set_result((answer, slice(start, stop)))
      start = stop

  def _predict_all(self, pixels: list[np.ndarray]) -> T:
    return self._predict(
      pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
    )

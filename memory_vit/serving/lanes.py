"""Threads for the work of requests; light requests overtake heavy ones.

The weight of work is its duration, given as the number of pixels of a plain
image that can be decoded in that time. The weight of a request is the sum over
its images: many small files can take longer than a single large one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from memory_vit.images.reader import THREADS

T = TypeVar("T")
# Work of at least this weight (about 10 ms) must not delay light requests.
_HEAVY = 500_000
HEAVY_THREADS = max(1, THREADS - 1)
# Heavy work waits for light requests at most this long, to avoid starvation.
PATIENCE_SECONDS = 0.05


def is_heavy(weight: int) -> bool:
  return weight >= _HEAVY


class Lanes:
  """Two thread pools: heavy work never uses the threads of light work.

  Heavy work also waits while a light request is being answered: decoders hold
  the GIL for a long time, and each step of an answer needs the GIL.
  """

  def __init__(self) -> None:
    self._requests = 0
    self._calm = threading.Event()
    self._calm.set()
    self._light = _Lane(THREADS, "light")
    self._heavy = _Lane(HEAVY_THREADS, "heavy", self._calm)

  @contextlib.contextmanager
  def light_request(self) -> Iterator[None]:
    """Make heavy work wait while the body runs."""
    self._requests += 1
    self._calm.clear()
    try:
      yield
    finally:
      self._requests -= 1
      if not self._requests:
        self._calm.set()

  async def run(self, weight: int, work: Callable[[], T]) -> T:
    """Run work in a thread; lighter work that is waiting goes first."""
    lane = self._heavy if is_heavy(weight) else self._light
    return await lane.run(_Waiting(weight, next(_order), work))

  def close(self) -> None:
    for lane in (self._light, self._heavy):
      lane.threads.shutdown(wait=False, cancel_futures=True)


_order = itertools.count()  # if weights are equal, the oldest work goes first


@dataclasses.dataclass(order=True)
class _Waiting(Generic[T]):
  weight: int
  order: int
  work: Callable[[], T] | None = dataclasses.field(compare=False)
  future: Future[T] = dataclasses.field(compare=False, default_factory=Future)


class _Lane:
  def __init__(
    self, threads: int, name: str, calm: threading.Event | None = None
  ) -> None:
    self.threads = ThreadPoolExecutor(threads, name)
    self._calm = calm
    self._waiting: queue.PriorityQueue[_Waiting[Any]] = queue.PriorityQueue()

  async def run(self, waiting: _Waiting[T]) -> T:
    self._waiting.put(waiting)
    # A free thread runs the lightest waiting work, not necessarily this work.
    self.threads.submit(self._run_lightest)
    try:
      return await asyncio.wrap_future(waiting.future)
    finally:
      waiting.work = None  # frees the images of a client that left

  def _run_lightest(self) -> None:
    if self._calm:
      self._calm.wait(PATIENCE_SECONDS)
    lightest = self._waiting.get_nowait()
    work, future = lightest.work, lightest.future
    if work is None or not future.set_running_or_notify_cancel():
      return  # the client has left
    try:
      future.set_result(work())
    except BaseException as error:
      future.set_exception(error)

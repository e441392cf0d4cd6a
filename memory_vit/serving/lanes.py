"""Threads for the work of requests, in which light requests pass heavy ones.

The weight of work is its time, in pixels of a plain image that take as long to
decode. That of a request is the sum over its images: many small files can take
longer than a large one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from memory_vit.images.reader import THREADS

T = TypeVar("T")
# Work of this weight takes about 10 ms, for which a light request may wait.
_HEAVY = 500_000
HEAVY_THREADS = max(1, THREADS - 1)


def is_heavy(weight: int) -> bool:
  return weight >= _HEAVY


class Lanes:
  """Two groups of threads: heavy work never takes those of light work."""

  def __init__(self) -> None:
    self._light = _Lane(THREADS, "light")
    self._heavy = _Lane(HEAVY_THREADS, "heavy")

  async def run(self, weight: int, work: Callable[[], T]) -> T:
    """Run work in a thread, after lighter work that waits."""
    lane = self._heavy if is_heavy(weight) else self._light
    return await lane.run(_Waiting(weight, next(_order), work))

  def close(self) -> None:
    for lane in (self._light, self._heavy):
      lane.threads.shutdown(wait=False, cancel_futures=True)


_order = itertools.count()  # of equal weights the oldest goes first


@dataclasses.dataclass(order=True)
class _Waiting(Generic[T]):
  weight: int
  order: int
  work: Callable[[], T] | None = dataclasses.field(compare=False)
  future: Future[T] = dataclasses.field(compare=False, default_factory=Future)


class _Lane:
  def __init__(self, threads: int, name: str) -> None:
    self.threads = ThreadPoolExecutor(threads, name)
    self._waiting: queue.PriorityQueue[_Waiting[Any]] = queue.PriorityQueue()

  async def run(self, waiting: _Waiting[T]) -> T:
    self._waiting.put(waiting)
    # A thread that becomes free takes the lightest work, whichever was added.
    self.threads.submit(self._run_lightest)
    try:
      return await asyncio.wrap_future(waiting.future)
    finally:
      waiting.work = None  # frees the images of a client that left

  def _run_lightest(self) -> None:
    lightest = self._waiting.get_nowait()
    work, future = lightest.work, lightest.future
    if work is None or not future.set_running_or_notify_cancel():
      return  # nobody waits for it
    try:
      future.set_result(work())
    except BaseException as error:
      future.set_exception(error)

"""State that the routes of a server share, from warm-up to shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeVar

from memory_vit.runtime.messages import one_line
from memory_vit.serving.access import Token, read_token
from memory_vit.serving.answering import Answering
from memory_vit.serving.attention import AttentionService
from memory_vit.serving.background_compiler import BackgroundCompiler
from memory_vit.serving.metrics import Metrics
from memory_vit.serving.request_error import busy
from memory_vit.serving.settings import ServerSettings
from memory_vit.serving.task_changes import ChangeThread, TaskRoot
from memory_vit.serving.task_folder import TaskFolder
from memory_vit.serving.task_follower import TaskFollower

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor

logger = logging.getLogger(__name__)
_Part = TypeVar("_Part")
BUSY_SECONDS = 5.0
_TRIM_SECONDS = 10.0


class Service:
  """State and threads that the routes of one application share."""

  def __init__(
    self, predictor: Predictor, settings: ServerSettings, refuse_changes: str
  ) -> None:
    self.stopping = False
    self.problem = ""  # why the warm-up failed, in one line, or ""
    self.predictor = predictor
    self.settings = settings
    self.metrics = Metrics(predictor.backbone.config.dtype)
    self.token: Token = read_token(settings.token_file)
    folder = TaskFolder(settings.state_dir)
    self.follower = TaskFollower(predictor, folder)
    self.task_root = TaskRoot(settings.task_root)
    self.changes = ChangeThread(self.metrics.change)
    self.refuse_changes = refuse_changes  # why changes are refused, or ""
    self._answering: Answering | None = None
    self._attention = AttentionService(predictor, settings.timeout)
    self.compiler = BackgroundCompiler(predictor, self._attention)
    self._warm = False
    self._settled = asyncio.Event()
    self._watch()

  @property
  def state(self) -> str:
    if self.problem:
      return "failed"
    if self.stopping:
      return "stopping"
    return "ready" if self._warm else "warming up"

  async def settled(self) -> None:
    """Wait until the warm-up has succeeded or failed."""
    await self._settled.wait()

  @property
  def answering(self) -> Answering:
    return self._once_warm(self._answering)

  @property
  def attention(self) -> AttentionService:
    return self._once_warm(self._attention)

  def _once_warm(self, part: _Part | None) -> _Part:
    """Return `part`; raise status 503 unless the warm-up has succeeded."""
    if part is None or not self._warm:
      raise busy(f"the server is {self.state}.", BUSY_SECONDS)
    return part

  def close(self) -> None:
    """Stop changing tasks; remove the folder of tasks if it is temporary."""
    self.follower.close()

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Warm up in the background; on exit, stop without joining threads."""
    self._answering = Answering(self.predictor, self.settings, self.metrics)
    tasks = [
      asyncio.create_task(work)
      for work in (self._warm_up(), self._follow(), _return_memory())
    ]
    try:
      yield
    finally:
      self.stopping = True
      for task in tasks:
        task.cancel()
      self._answering.close()
      self._attention.close()
      self.changes.close()
      self.close()

  async def _warm_up(self) -> None:
    """Compile the smallest batch size, become ready, then compile the rest."""
    try:
      compiled = await asyncio.to_thread(self.predictor.warm_up, 1)
      await asyncio.to_thread(self.follower.look)
    except Exception as error:
      self.problem = one_line(str(error)) or type(error).__name__
      logger.exception("the warm-up failed; /healthz reports the failure")
    else:
      self._warm = True
      logger.info(
        "ready: %d programs compiled; requests are answered in batches of %d "
        "until other programs are compiled",
        compiled, self.predictor.batch_sizes[0],
      )  # fmt: skip
    finally:
      self._settled.set()
    if self._warm:
      await self.compiler.run()

  async def _follow(self) -> None:
    await self._settled.wait()
    await self.follower.follow()

  def _watch(self) -> None:
    predictor, watch = self.predictor, self.metrics.watch
    watch(
      "queue_images",
      "Images of accepted requests that are not yet answered.",
      lambda: self._answering.taken if self._answering else 0,
    )
    watch(
      "compilations",
      "Programs that were compiled by requests and by changes of tasks.",
      lambda: predictor.compilations + self._attention.compilations,
    )
    watch("tasks", "Tasks that answer.", lambda: len(predictor.task_set.names))
    watch("ready", "1 if ready, else 0.", lambda: self.state == "ready")


async def _return_memory() -> None:
  while True:
    await asyncio.sleep(_TRIM_SECONDS)
    await asyncio.to_thread(trim_memory)


def trim_memory() -> None:
  """Return to the system the freed memory that glibc would otherwise keep."""
  # Our commands set thresholds with which Python seldom collects garbage by
  # itself. Without this call of `gc.collect`, a server kept 300 MiB of refused
  # requests (`benchmarks.attacks`).
  gc.collect()
  with contextlib.suppress(AttributeError, OSError, TypeError):
    ctypes.CDLL(None).malloc_trim(0)

"""Changes of tasks that clients ask for: checked, made, and logged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from memory_vit.errors import (
  ConfigError,
  MemoryVitError,
  TaskError,
  UnknownTask,
)
from memory_vit.model.task import NAME_RULE, is_name
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief
from memory_vit.serving.request_error import RequestError, client_left
from memory_vit.serving.server_log import audit
from memory_vit.serving.task_folder import TaskFolder
from memory_vit.serving.task_follower import Changed, TaskFollower
from memory_vit.tasks import store

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor

# In messages, in place of the file's name on the server.
_UPLOADED = "the uploaded task"


@contextlib.contextmanager
def logging_refusals(action: str, name: str, client: str) -> Iterator[None]:
  """Log why a change was not made, and raise what the client gets for it."""
  try:
    yield
  except asyncio.CancelledError:  # its thread may make the change, and logs it
    audit(action, name, client, "cut off before its answer")
    raise
  except Exception as error:
    refusal = _refusal(error, action)
    audit(action, name, client, f"refused: {refusal.message}")
    raise refusal from error


class TaskChanges:
  """Changes the tasks of a folder, one change at a time."""

  def __init__(
    self,
    predictor: Predictor,
    folder: TaskFolder,
    follower: TaskFollower,
    task_root: str | None,
    on_change: Callable[[str], None],
    refusal: str = "",
  ) -> None:
    self.refusal = refusal  # why no task can be changed here; or ""
    self._predictor = predictor
    self._folder, self._follower = folder, follower
    self._on_change = on_change
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasks")
    self._root: Path | None = None
    if task_root is not None:
      self._root = paths.local(task_root, "--task_root").resolve()
      if not self._root.is_dir():
        raise ConfigError(
          f"--task_root is {brief(task_root)}, which is no directory."
        )

  def close(self) -> None:
    """End; a change that is being made is whole or absent, as after a kill."""
    self._thread.shutdown(wait=False, cancel_futures=True)

  async def upload(
    self, name: str, content: AsyncIterator[bytes], client: str
  ) -> Changed:
    """Add or replace a task by the bytes of its .safetensors file."""
    with self._folder.part() as part:
      with part.open("xb") as file:
        async for chunk in content:
          await asyncio.to_thread(file.write, chunk)

      def put() -> Changed:
        try:
          task = store.load_task(part, self._predictor.backbone)
        except TaskError as error:
          message = str(error).replace(str(part), _UPLOADED)
          raise TaskError(message) from error
        return self._follower.put(name, task, part)

      return await self._change(name, client, put)

  async def put_path(self, name: str, text: str, client: str) -> Changed:
    """Add or replace a task by its path below --task_root."""
    path = self._below_root(text)

    def put() -> Changed:
      try:
        task = store.load_task(path, self._predictor.backbone)
      except TaskError as error:
        raise TaskError(str(error).replace(str(path), brief(text))) from error
      with self._folder.part() as part:
        store.save_task(task, part)
        return self._follower.put(name, task, part)

    return await self._change(name, client, put)

  async def remove(self, name: str, client: str) -> Changed:
    remove = functools.partial(self._follower.remove, name)
    return await self._change(name, client, remove)

  async def _change(
    self, name: str, client: str, make: Callable[[], Changed]
  ) -> Changed:
    """Make a change in the thread for changes, which also logs it."""

    def make_and_log() -> Changed:
      changed = make()
      outcome = (
        f"version={changed.change.version} digest={changed.digest or '-'}"
      )
      audit(changed.action, name, client, outcome)
      self._on_change(changed.action)
      return changed

    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._thread, make_and_log)

  def _below_root(self, text: str) -> Path:
    """The path of a task below --task_root, with links resolved."""
    if self._root is None:
      raise RequestError(
        403,
        "paths of the server cannot be used: it was started without "
        "--task_root=DIR. Upload a .safetensors file of the task.",
      )
    try:
      path = (self._root / text).resolve()
      found = path.is_relative_to(self._root) and path.exists()
    except (OSError, RuntimeError, ValueError):
      found = False
    if not found:  # the client does not learn which paths exist elsewhere
      raise RequestError(
        422, f"path {brief(text)}: there is no such task below --task_root."
      )
    return path


def require_name(name: str) -> None:
  if not is_name(name):
    raise RequestError(422, f"task name {brief(name)}: expected {NAME_RULE}.")


def _refusal(error: Exception, action: str) -> RequestError:
  if isinstance(error, RequestError):
    return error
  if isinstance(error, ClientDisconnect):
    return client_left()
  if isinstance(error, UnknownTask):
    return RequestError(404, str(error), known=list(error.known))
  if isinstance(error, TaskError):
    return RequestError(409 if action == "remove" else 422, str(error))
  for cause in (error, error.__cause__):
    if isinstance(cause, OSError):
      return _not_stored(cause)
  if isinstance(error, MemoryVitError):
    return RequestError(500, f"{error} Nothing has changed.")
  logging.getLogger(__name__).exception("a change of tasks failed")
  return RequestError(500, "the server failed; its log says how.")


def _not_stored(error: OSError) -> RequestError:
  """Status 507 for a full disk, else 500; the tasks are as before."""
  is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
  reason = error.strerror or type(error).__name__
  return RequestError(
    507 if is_full else 500,
    f"the folder of tasks cannot be written ({reason}): no change.",
  )

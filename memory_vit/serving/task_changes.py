"""Changes of tasks that clients ask for: checked, answered, and logged."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from memory_vit.errors import (
  ConfigError,
  MemoryVitError,
  TaskError,
  UnknownTask,
)
from memory_vit.model.task import BACKBONE, NAME_PATTERN
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief, escaped
from memory_vit.serving.request_error import RequestError, one_line
from memory_vit.serving.task_folder import TaskFolder
from memory_vit.serving.task_follower import Changed, TaskFollower
from memory_vit.tasks import store

if TYPE_CHECKING:
  from memory_vit.prediction import Predictor

audit = logging.getLogger("memory_vit.serving.audit")
# In messages, in place of where the server keeps it.
_UPLOADED = "the uploaded task"


class TaskChanges:
  """Changes the tasks of a folder, one change at a time.

  Every change, and every one that is refused, is a line of the log.
  """

  def __init__(
    self,
    predictor: Predictor,
    folder: TaskFolder,
    follower: TaskFollower,
    task_root: str | None,
    on_change: Callable[[str], None],
    refusal: str = "",
  ) -> None:
    """Change nothing yet.

    Args:
      predictor: on whose backbone tasks must run.
      folder: of the tasks.
      follower: makes the changes.
      task_root: the directory below which clients may name tasks, or none.
      on_change: is called with each action.
      refusal: why no task can be changed here; "" if tasks can be changed.

    Raises:
      ConfigError: for a task root that is no directory.
    """
    self.refusal = refusal
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
    """Add or replace a task by the bytes of a .safetensors file of one.

    Raises:
      RequestError: for a name or a task that cannot be used.
    """
    require_name(name)
    with self._folder.part() as part:
      try:
        with part.open("xb") as file:
          async for some in content:
            await asyncio.to_thread(file.write, some)
      except OSError as error:
        refusal = _not_stored(error)
        audit_refused("put", name, client, refusal.message)
        raise refusal from error

      def put() -> Changed:
        try:
          task = store.load_task(part, self._predictor.backbone)
        except TaskError as error:
          message = str(error).replace(str(part), _UPLOADED)
          raise TaskError(message) from error
        return self._follower.put(name, task, part)

      return await self._change("put", name, client, put)

  async def put_path(self, name: str, text: str, client: str) -> Changed:
    """Add or replace a task by its path below --task_root.

    Raises:
      RequestError: for a name, a path or a task that cannot be used.
    """
    require_name(name)
    path = self._below_root(text)

    def put() -> Changed:
      try:
        task = store.load_task(path, self._predictor.backbone)
      except TaskError as error:
        raise TaskError(str(error).replace(str(path), brief(text))) from error
      with self._folder.part() as part:
        store.save_task(task, part)
        return self._follower.put(name, task, part)

    return await self._change("put", name, client, put)

  async def remove(self, name: str, client: str) -> Changed:
    """Remove a task.

    Raises:
      RequestError: 404 where there is none of this name, 409 where others
        read it, 507 or 500 where the folder cannot be written.
    """
    require_name(name)
    remove = functools.partial(self._follower.remove, name)
    return await self._change("remove", name, client, remove)

  async def _change(
    self, action: str, name: str, client: str, make: Callable[[], Changed]
  ) -> Changed:
    """Make a change in the thread for them, which also logs its outcome."""

    def make_and_log() -> Changed:
      try:
        changed = make()
      except Exception as error:
        refusal = _refusal(error, action)
        audit_refused(action, name, client, refusal.message)
        raise refusal from error
      version = changed.change.version
      _audit(
        changed.action, name, client,
        f"version={version} digest={changed.digest or '-'}",
      )  # fmt: skip
      return changed

    loop = asyncio.get_running_loop()
    changed = await loop.run_in_executor(self._thread, make_and_log)
    self._on_change(changed.action)
    return changed

  def _below_root(self, text: str) -> Path:
    """The path of a task on this machine, with all links resolved."""
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
    if not found:  # what lies elsewhere is not told from what is not there
      raise RequestError(
        422, f"path {brief(text)}: there is no such task below --task_root."
      )
    return path


def require_name(name: str) -> None:
  """Refuse what is no name of a task, such as a path."""
  if not NAME_PATTERN.fullmatch(name) or name == BACKBONE:
    raise RequestError(
      422,
      f"task name {brief(name)}: expected 1 to 64 of a-z, 0-9, '_' and '-', "
      f"starting with a letter or digit, and not {BACKBONE!r}.",
    )


def _refusal(error: Exception, action: str) -> RequestError:
  """What the client gets for a change that was not made."""
  if isinstance(error, RequestError):
    return error
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


def audit_refused(action: str, name: str, client: str, problem: str) -> None:
  """Write the line of a change that was refused."""
  _audit(action, name, client, f"refused: {one_line(problem)}")


def _audit(action: str, name: str, client: str, outcome: str) -> None:
  when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
  audit.info(
    "audit %s %s name=%s client=%s %s",
    when, action, brief(name), escaped(client), outcome,
  )  # fmt: skip

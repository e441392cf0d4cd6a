"""Changes of tasks that clients request: made one at a time, and logged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.requests import ClientDisconnect

from memory_vit.errors import (
  ConfigError,
  MemoryVitError,
  TaskError,
  UnknownTask,
)
from memory_vit.model.backbone import Backbone
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief
from memory_vit.serving.request_error import RequestError, client_left
from memory_vit.serving.server_log import audit
from memory_vit.serving.task_follower import Changed
from memory_vit.tasks import store


class ChangeThread:
  """Makes changes one at a time in a thread; logs and counts each change."""

  def __init__(self, on_change: Callable[[str], None]) -> None:
    self._on_change = on_change
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasks")

  async def run(self, client: str, make: Callable[[], Changed]) -> Changed:
    """Make a change in the thread, even if the client leaves meanwhile."""

    def make_and_log() -> Changed:
      changed = make()
      outcome = f"digest={changed.digest or '-'}"
      audit(changed.action, changed.name, client, outcome)
      self._on_change(changed.action)
      return changed

    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._thread, make_and_log)

  def close(self) -> None:
    """Stop; a change in progress is made either fully or not at all."""
    self._thread.shutdown(wait=False, cancel_futures=True)


class TaskRoot:
  """Directory from which clients may add tasks by path; None allows no path."""

  def __init__(self, task_root: str | None) -> None:
    self._root: Path | None = None
    if task_root is not None:
      self._root = paths.local(task_root, "--task_root").resolve()
      if not self._root.is_dir():
        raise ConfigError(
          f"--task_root is {brief(task_root)}, which is not a directory."
        )

  def content(self, text: str, backbone: Backbone) -> bytes:
    """Load the task at a path; return it as bytes of a .safetensors file."""
    path = self._below(text)
    try:
      task = store.load_task(path, backbone)
    except TaskError as error:
      raise TaskError(str(error).replace(str(path), brief(text))) from error
    with tempfile.TemporaryDirectory(prefix="memory_vit_serve-") as folder:
      file = Path(folder) / "task.safetensors"
      store.save_task(task, file)
      return file.read_bytes()

  def _below(self, text: str) -> Path:
    """Return the resolved path; raise unless it exists below --task_root."""
    if self._root is None:
      raise RequestError(
        403,
        "tasks cannot be added by path: the server was started without "
        "--task_root=DIR. Upload a .safetensors file of the task.",
      )
    try:
      path = (self._root / text).resolve()
      exists = path.is_relative_to(self._root) and path.exists()
    except (OSError, RuntimeError, ValueError):
      exists = False
    if not exists:  # hide the reason: clients must not learn which paths exist
      raise RequestError(
        422, f"path {brief(text)}: there is no such task below --task_root."
      )
    return path


@contextlib.contextmanager
def logging_refusals(action: str, name: str, client: str) -> Iterator[None]:
  """Log why a change fails, and raise the `RequestError` for the client."""
  try:
    yield
  except asyncio.CancelledError:  # the change may go on in its thread
    audit(action, name, client, "cancelled before its answer")
    raise
  except Exception as error:
    refusal = _refusal(error, action)
    audit(action, name, client, f"refused: {refusal.message}")
    raise refusal from error


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
    if isinstance(cause, OSError):  # such as a full disk or read-only folder
      is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
      reason = cause.strerror or type(cause).__name__
      return RequestError(
        507 if is_full else 500,
        f"the folder of tasks cannot be read or written ({reason}): no change "
        "was made.",
      )
  if isinstance(error, MemoryVitError):
    return RequestError(500, f"{error} Nothing has changed.")
  logging.getLogger(__name__).exception("a change of tasks failed")
  return RequestError(500, "the server failed; its log says how.")

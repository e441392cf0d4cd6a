"""Add, replace and remove tasks of a server, one change at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memory_vit.errors import (
  ConfigError,
  MemoryVitError,
  TaskError,
  TrainingError,
)
from memory_vit.model.task import BACKBONE, NAME_PATTERN
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief, escaped
from memory_vit.serving.request_error import RequestError, one_line
from memory_vit.serving.task_store import TaskStore
from memory_vit.tasks import store as task_files

if TYPE_CHECKING:
  from memory_vit.model.task import Task
  from memory_vit.prediction import Change, Predictor

audit = logging.getLogger("memory_vit.serving.audit")
# In messages, in place of where the server keeps it.
_UPLOADED = "the uploaded task"


@dataclasses.dataclass(frozen=True)
class Changed:
  """A change, and what was done: "add", "replace" or "remove"."""

  action: str
  change: Change


class TaskChanges:
  """Changes the tasks of a predictor, and keeps their files.

  Every change, and every one that is refused, is a line of the log.
  """

  def __init__(
    self,
    predictor: Predictor,
    store: TaskStore,
    task_root: str | None,
    on_change: Callable[[str], None] = lambda action: None,
  ) -> None:
    """Change nothing yet; `on_change` is told each action.

    Raises:
      ConfigError: for a task root that is no directory.
    """
    self._predictor = predictor
    self._store = store
    self._on_change = on_change
    self._one = asyncio.Lock()
    self._root: Path | None = None
    if task_root is not None:
      self._root = paths.local(task_root, "--task_root").resolve()
      if not self._root.is_dir():
        raise ConfigError(
          f"--task_root is {brief(task_root)}, which is no directory."
        )

  def restore(self) -> None:
    """Add what was kept; under a name that is given as well, in its place.

    A task follows those that it attends to: so tasks which cannot be added yet
    are tried again after the others.

    Raises:
      TaskError: where one cannot be read, or fits no more.
    """
    waiting = self._store.kept()
    while waiting:
      left, problem = [], None
      for name, path in waiting:
        try:
          self._put(name, task_files.load_task(path, self._predictor.backbone))
        except TaskError as error:
          left.append((name, path))
          problem = TaskError(
            f"{path}, which was added to the server, cannot be used: {error} "
            "Remove the file, or mend what it needs."
          )
      if problem and len(left) == len(waiting):
        raise problem
      waiting = left

  async def upload(
    self, name: str, content: AsyncIterator[bytes], client: str
  ) -> Changed:
    """Add or replace a task by the bytes of a .safetensors file of one.

    Raises:
      RequestError: for a name or a task that cannot be used.
    """
    require_name(name)
    with self._store.upload() as path:
      try:
        with path.open("xb") as file:
          async for part in content:
            await asyncio.to_thread(file.write, part)
      except OSError as error:
        raise _not_stored("put", name, client, error) from error
      return await self._put_file(name, path, _UPLOADED, client)

  async def put_path(self, name: str, text: str, client: str) -> Changed:
    """Add or replace a task by its path below --task_root.

    Raises:
      RequestError: for a name, a path or a task that cannot be used.
    """
    require_name(name)
    path = self._below_root(text)
    return await self._put_file(name, path, brief(text), client)

  async def remove(self, name: str, client: str) -> Changed:
    """Remove a task.

    Raises:
      RequestError: 404 where there is none of this name, 409 where others
        read it, 500 where its file cannot be removed. It answers then.
    """
    require_name(name)
    async with self._one:
      before = self._digest(name)
      try:
        change = await asyncio.to_thread(self._remove, name)
      except OSError as error:
        raise _not_stored("remove", name, client, error) from error
      except TaskError as error:
        known = self._predictor.task_set.names
        _audit("remove", name, client, problem=str(error))
        if name not in known:
          raise RequestError(404, str(error), known=list(known)) from error
        raise RequestError(409, str(error)) from error
      _audit("remove", name, client, change.version, before)
    self._on_change("remove")
    return Changed("remove", change)

  async def _put_file(
    self, name: str, path: Path, shown: str, client: str
  ) -> Changed:
    """Check a file or directory, and let it answer."""
    async with self._one:
      try:
        changed = await asyncio.to_thread(self._check_and_put, name, path)
      except TrainingError as error:  # of its file, before it could answer
        reason = error.__cause__
        cause = reason if isinstance(reason, OSError) else OSError()
        raise _not_stored("put", name, client, cause) from error
      except MemoryVitError as error:
        message = str(error).replace(str(path), shown)
        _audit("put", name, client, problem=message)
        raise RequestError(422, message) from error
      except OSError as error:
        raise _not_stored("put", name, client, error) from error
      version = changed.change.version
      _audit(changed.action, name, client, version, self._digest(name))
    self._on_change(changed.action)
    return changed

  def _check_and_put(self, name: str, path: Path) -> Changed:
    task = task_files.load_task(path, self._predictor.backbone)
    changed: Changed | None = None
    old = self._answering(name)
    try:
      with self._store.keeping(name, task):
        changed = self._put(name, task)
        self._require_finite(name)
    except (OSError, TaskError):
      if changed is not None:
        self._undo(name, old)
      raise
    return changed

  def _remove(self, name: str) -> Change:
    if name not in self._predictor.task_set.names:
      return self._predictor.remove(name)  # raises
    with self._store.removing(name):
      return self._predictor.remove(name)

  def _answering(self, name: str) -> Task | None:
    """The task of this name that answers now."""
    by_slot = self._predictor.task_set.by_slot
    return next((task for task in by_slot.values() if task.name == name), None)

  def _undo(self, name: str, old: Task | None) -> None:
    """Let the task that was there before answer again."""
    if old is None:
      self._predictor.remove(name)
    else:
      self._predictor.replace(name, old)

  def _require_finite(self, name: str) -> None:
    """Raise `TaskError` for a task that overflows, as for a grey image."""
    side = self._predictor.backbone.config.image_size
    has_head = bool(self._predictor.backbone.config.num_classes)
    grey = np.zeros((1, side, side, 3), np.float32)
    # What requests run, so that nothing is compiled for it.
    answer = self._predictor.predict_pixels(grey, original=has_head)
    answer.probabilities(name)

  def _put(self, name: str, task: Task) -> Changed:
    """Replace the task of this name, or add one."""
    if name in self._predictor.task_set.names:
      return Changed("replace", self._predictor.replace(name, task))
    return Changed("add", self._predictor.add(task, name=name))

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

  def _digest(self, name: str) -> str:
    """The digest of a task that answers now, or ""."""
    described = self._predictor.task_set.describe()
    return next((one.digest for one in described if one.name == name), "")


def require_name(name: str) -> None:
  """Refuse what is no name of a task, such as a path."""
  if not NAME_PATTERN.fullmatch(name) or name == BACKBONE:
    raise RequestError(
      422,
      f"task name {brief(name)}: expected 1 to 64 of a-z, 0-9, '_' and '-', "
      f"starting with a letter or digit, and not {BACKBONE!r}.",
    )


def _not_stored(
  action: str, name: str, client: str, error: OSError
) -> RequestError:
  """Status 500 where files fail; the tasks that answer are as before."""
  reason = error.strerror or type(error).__name__
  message = f"its file cannot be written or removed ({reason}): no change."
  _audit(action, name, client, problem=message)
  return RequestError(500, message)


def _audit(
  action: str,
  name: str,
  client: str,
  version: int | None = None,
  digest: str = "",
  problem: str = "",
) -> None:
  """Write the line of a change, or of one that was refused."""
  when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
  if problem:
    outcome = f"refused: {one_line(problem)}"
  else:
    outcome = f"version={version} digest={digest or '-'}"
  audit.info(
    "audit %s %s name=%s client=%s %s",
    when, action, brief(name), escaped(client), outcome,
  )  # fmt: skip


def audit_refused(action: str, name: str, client: str, problem: str) -> None:
  """Write the line of a change that was refused before it was looked at."""
  _audit(action, name, client, problem=problem)

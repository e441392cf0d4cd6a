"""Add, replace and remove tasks of a server, one change at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
from memory_vit.prediction import task_set as sets
from memory_vit.runtime import paths
from memory_vit.runtime.messages import brief, escaped, name_list
from memory_vit.serving.request_error import RequestError, one_line
from memory_vit.serving.task_store import TaskStore
from memory_vit.tasks import compose
from memory_vit.tasks import store as task_files

if TYPE_CHECKING:
  from memory_vit.model.task import Task
  from memory_vit.prediction import Change, Predictor, TaskSet

audit = logging.getLogger("memory_vit.serving.audit")
# In messages, in place of where the server keeps it.
_UPLOADED = "the uploaded task"


@dataclasses.dataclass(frozen=True)
class Changed:
  """A change of a set of tasks.

  Attributes:
    action: "add", "replace" or "remove".
    change: what it did.
    waiting: of several servers with one set, those that live and did not say in
      time that they answer by the new one.
  """

  action: str
  change: Change
  waiting: tuple[str, ...] = ()


class TaskChanges:
  """Changes the tasks of a predictor, and keeps their files.

  Every change, and every one that is refused, is a line of the log. A subclass
  may `take` and `drop` tasks otherwise, such as on several servers at once.
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
    # Whether what was added is there after a restart, as what was given is.
    self._is_kept = store.is_kept
    self._given = tuple(predictor.task_set.by_slot.values())
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
    self.add_kept(self._store.kept())

  def add_kept(self, kept: Sequence[tuple[str, Path]]) -> None:
    """Add tasks, (name, file) of each, as `restore` does."""
    waiting = list(kept)
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

  async def prepare(self) -> None:
    """Called before the predictor is warm."""

  async def begin(self) -> None:
    """Called once the predictor is warm; requests are answered after it."""

  async def end(self) -> None:
    """Called at the end, once all that was taken is answered."""

  @property
  def problem(self) -> str:
    """Why no more changes can come here, in one line; "" where they can."""
    return ""

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
        read it, or could not be restored without it, 500 where its file cannot
        be removed. It answers then.
    """
    require_name(name)
    async with self._one:
      before = self._digest(name)
      try:
        changed = await self.drop(name)
      except OSError as error:
        raise _not_stored("remove", name, client, error) from error
      except TaskError as error:
        known = self._predictor.task_set.names
        _audit("remove", name, client, problem=str(error))
        if name not in known:
          raise RequestError(404, str(error), known=list(known)) from error
        raise RequestError(409, str(error)) from error
      except RequestError as refusal:
        _audit("remove", name, client, problem=refusal.message)
        raise
      _audit("remove", name, client, changed.change.version, before)
    self._on_change("remove")
    return changed

  async def _put_file(
    self, name: str, path: Path, shown: str, client: str
  ) -> Changed:
    """Check a file or directory, and let it answer."""
    async with self._one:
      try:
        task = await asyncio.to_thread(
          task_files.load_task, path, self._predictor.backbone
        )
        changed = await self.take(name, task)
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
      except RequestError as refusal:
        _audit("put", name, client, problem=refusal.message)
        raise
      version = changed.change.version
      _audit(changed.action, name, client, version, self._digest(name))
    self._on_change(changed.action)
    return changed

  async def take(self, name: str, task: Task) -> Changed:
    """Let a task that was loaded answer under a name, and keep it.

    Raises:
      MemoryVitError: where it cannot answer, or not be written.
      OSError: where it cannot be kept. Nothing has changed then.
    """
    return await asyncio.to_thread(self._check_and_put, name, task)

  async def drop(self, name: str) -> Changed:
    """Let the task of a name answer no more, and keep it no longer.

    Raises:
      TaskError: where there is none, or others read it.
      OSError: where its file cannot be removed. Nothing has changed then.
    """
    return Changed("remove", await asyncio.to_thread(self._remove, name))

  def _check_and_put(self, name: str, task: Task) -> Changed:
    changed: Changed | None = None
    _, wanted = self._with(name, task)
    self._require_restorable(wanted.values())
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
    self._require_restorable(self._without(name).values())
    with self._store.removing(name):
      return self._predictor.remove(name)

  def _with(self, name: str, task: Task) -> tuple[str, dict[int, Task]]:
    """Plan to add or replace a task: the action, and {slot: task} after it.

    Raises:
      TaskError: where they do not fit together.
    """
    by_slot = self._predictor.task_set.by_slot
    if name in self._predictor.task_set.names:
      return "replace", sets.with_replaced(by_slot, name, task)
    return "add", sets.with_added(by_slot, sets.named(task, name))

  def _without(self, name: str) -> dict[int, Task]:
    """{slot: task} without one; `TaskError` where it must stay, or is not."""
    return sets.without(self._predictor.task_set.by_slot, name)

  def _require_restorable(self, tasks: Iterable[Task]) -> None:
    """Refuse tasks that a restart could not put beside those of --task.

    Those that were removed are there again then.

    Raises:
      RequestError: 409 where that set would not fit together.
    """
    tasks = tuple(tasks)
    names = [task.name for task in tasks]
    again = [task for task in self._given if task.name not in names]
    if not self._is_kept or not again:
      return
    try:
      compose.require_one_pass([*tasks, *again])
      self._require_same_parents(again, tasks)
    except TaskError as error:
      gone = name_list([task.name for task in again])
      raise RequestError(
        409,
        f"the server could not start again: {gone}, given by --task, would be "
        f"there again beside what --state_dir keeps, and {error} Start the "
        f"server without --task of {gone}, then change its tasks.",
      ) from error

  def _require_same_parents(
    self, again: Iterable[Task], tasks: Iterable[Task]
  ) -> None:
    """Raise `TaskError` where a given task attends to what has been replaced.

    A task may not know the digests of those that it attends to, and would fit.
    """
    initial_digests = {task.name: task.digest for task in self._given}
    now = {task.name: task.digest for task in tasks}
    for task in again:
      for name in task.spec.attends_to:
        if name in now and now[name] != initial_digests.get(name):
          raise TaskError(
            f"{task.name} attends to {name} as it was given, which is replaced."
          )

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

  def _require_finite(self, name: str, task_set: TaskSet | None = None) -> None:
    """Raise `TaskError` for a task that overflows, as for a grey image.

    Args:
      name: of the task.
      task_set: that it is in; by default the tasks of now.
    """
    side = self._predictor.backbone.config.image_size
    has_head = bool(self._predictor.backbone.config.num_classes)
    grey = np.zeros((1, side, side, 3), np.float32)
    # What requests run, so that nothing is compiled for it.
    answer = self._predictor.predict_pixels(
      grey, original=has_head, task_set=task_set
    )
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

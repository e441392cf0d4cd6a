"""Follow a folder of tasks: one server's side.

A new set is made ready while the old one answers, and then shown. If it cannot
be made ready, the old set still answers, and it is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memory_vit.errors import (
  ConfigError,
  MemoryVitError,
  TaskError,
  UnknownTask,
)
from memory_vit.prediction import task_set as sets
from memory_vit.prediction.task_set import Change
from memory_vit.runtime import files
from memory_vit.runtime.checksums import file_digest
from memory_vit.runtime.messages import name_list, one_line
from memory_vit.serving.request_error import RequestError, busy
from memory_vit.serving.task_folder import (
  StoredSet,
  StoredTask,
  TaskFolder,
)
from memory_vit.tasks import store

if TYPE_CHECKING:
  from memory_vit.model.task import Task
  from memory_vit.prediction import Predictor, TaskSet

POLL_SECONDS = 1.0
# Between attempts to make a set ready: each may compile.
_AGAIN_SECONDS = 10.0
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Changed:
  """ "add", "replace" or "remove"; the digest of the task, or "" if unknown."""

  action: str
  change: Change
  digest: str


class TaskFollower:
  """Lets a predictor answer by the set of a folder, and changes that set."""

  def __init__(self, predictor: Predictor, folder: TaskFolder) -> None:
    """Show the set of the folder; without one, write the predictor's."""
    self._predictor, self._folder = predictor, folder
    self._lock = threading.Lock()  # taken after the lock of the folder
    self._failed: StoredSet | None = None
    self._again = 0.0
    self._wake = asyncio.Event()
    self._newer = asyncio.Event()  # a new event after each set that is shown
    self._loop: asyncio.AbstractEventLoop | None = None
    self._tasks: dict[tuple[str, str], Task] = {}
    self.problem = ""  # why the newest set does not answer here
    try:
      stored = folder.read() or self._first()
    except RequestError as error:  # another server is writing a large first set
      raise ConfigError(f"--state_dir: {error.message}") from error
    own = {task.name: task for task in predictor.task_set.by_slot.values()}
    if own and stored.tasks:  # an empty set prepares images as its next task
      self._require_same(predictor.preprocessing, stored.preprocessing)
    self._show(stored, self._made_ready(stored))
    shown = {one.name: one.digest for one in predictor.task_set.describe()}
    unused = [n for n, task in own.items() if shown.get(n) != task.digest]
    if unused:
      logger.warning(
        "--state_dir has other tasks than --task, and they answer: %s of "
        "--task are not used", name_list(unused),
      )  # fmt: skip

  @property
  def version(self) -> int:
    """Version of the set that answers."""
    return self._predictor.task_set.version

  async def follow(self) -> None:
    """Look into the folder once a second, until it is cancelled."""
    self._loop = asyncio.get_running_loop()
    while True:
      await asyncio.to_thread(self.look)
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(POLL_SECONDS):
          await self._wake.wait()
      self._wake.clear()

  async def at_least(self, version: int, seconds: float) -> None:
    """Wait until a set of this version or a later one answers, or raise 503."""
    if version <= self.version:
      return
    self._wake.set()
    try:
      async with asyncio.timeout(seconds):
        while self.version < version:
          await self._newer.wait()
    except TimeoutError:
      raise busy(
        f"x-min-version is {version}, and this server answers by {self.version}"
        f" of {self.newest}.",
        1,
      ) from None

  def look(self) -> None:
    """Show the newest set, or note why it cannot be shown."""
    with self._lock:
      try:
        newest = self._not_older(self._folder.read())
        self.newest = newest.version
        if newest == self._shown:
          self.problem, self._failed = "", None
          return
        if newest == self._failed and time.monotonic() < self._again:
          return
        self._failed = newest
        self._again = time.monotonic() + _AGAIN_SECONDS
        self._show(newest, self._made_ready(newest))
        logger.info("version %d of the tasks answers", newest.version)
      except Exception as error:  # such as no memory on the device
        problem = one_line(str(error)) or type(error).__name__
        if problem != self.problem:
          logger.error(  # noqa: TRY400 our own errors need no traceback
            "version %d of the tasks still answers: %s",
            self.version, problem,
            exc_info=not isinstance(error, MemoryVitError),
          )  # fmt: skip
        self.problem = problem

  def put(self, name: str, task: Task, part: Path) -> Changed:
    """Add or replace a task, whose file is `part`, for all servers."""
    sha256 = file_digest(part)
    with self._changing() as newest:
      by_slot = self._loaded(newest.tasks)
      if name in (one.name for one in newest.tasks):
        action, wanted = "replace", sets.with_replaced(by_slot, name, task)
      else:
        action = "add"
        wanted = sets.with_added(by_slot, sets.named(task, name))
      ready, change = self._predictor.make_ready(wanted, newest.version + 1)
      self._require_finite(name, ready)
      tasks = [one for one in newest.tasks if one.name != name]
      slot = ready.slots[name]
      tasks.append(StoredTask(name=name, sha256=sha256, slot=slot))
      self._publish(newest, tasks, ready, {sha256: part})
    return Changed(action, change, task.digest)

  def remove(self, name: str) -> Changed:
    """Remove a task, whose file may be damaged, for all servers."""
    with self._changing() as newest:
      tasks = [one for one in newest.tasks if one.name != name]
      if len(tasks) == len(newest.tasks):
        known = tuple(one.name for one in tasks)
        raise UnknownTask(f"there is no task {name!r}.", known)
      digests = {o.name: o.digest for o in self._predictor.task_set.describe()}
      readable = self._readable(newest.tasks)
      by_name = {task.name: task for task in readable.values()}
      removed = by_name.pop(name, None)
      if lost := [one.name for one in tasks if one.name not in by_name]:
        attending = [n for n, t in by_name.items() if name in t.spec.attends_to]
        # Of an unreadable task, nobody knows what it attends to.
        if others := attending or (lost if removed else []):
          raise TaskError(
            f"task {name!r} cannot be removed: {name_list(others)} attend to "
            "it, or are damaged and may do so. Remove them first."
          )
        change = self._publish_unready(newest, tasks)
      else:
        left = {i: t for i, t in readable.items() if t.name != name}
        ready, change = self._predictor.make_ready(left, newest.version + 1)
        self._publish(newest, tasks, ready, {})
    return Changed("remove", change, digests.get(name, ""))

  @contextlib.contextmanager
  def _changing(self) -> Iterator[StoredSet]:
    with self._folder.changing() as newest, self._lock:
      yield self._not_older(newest)

  def _publish(
    self,
    old: StoredSet,
    tasks: Iterable[StoredTask],
    ready: TaskSet,
    parts: Mapping[str, Path],
  ) -> None:
    new = self._stored(ready, tasks)
    self._folder.publish(new, old, parts)
    self._show(new, ready)

  def _publish_unready(
    self, old: StoredSet, tasks: Sequence[StoredTask]
  ) -> Change:
    """Let the old set answer here, so that damaged tasks can go one by one."""
    version = old.version + 1
    new = old.model_copy(update={"version": version, "tasks": tuple(tasks)})
    self._folder.publish(new, old, {})
    names = tuple(one.name for one in tasks)
    return Change(version, names, digest="", grew=False, compiled=0)

  def _stored(self, ready: TaskSet, tasks: Iterable[StoredTask]) -> StoredSet:
    return StoredSet(
      version=ready.version,
      backbone=self._predictor.backbone.id,
      preprocessing=ready.preprocessing,
      tasks=tuple(sorted(tasks, key=lambda one: one.slot)),
    )

  def _first(self) -> StoredSet:
    """The first set of a folder: the tasks of the predictor."""
    with (
      files.writing(self._folder.root),
      contextlib.ExitStack() as stack,
    ):
      if stored := stack.enter_context(self._folder.changing()):
        return stored  # another process came first
      tasks, parts = [], {}
      for slot, task in self._predictor.task_set.by_slot.items():
        part = stack.enter_context(self._folder.part())
        store.save_task(task, part)
        sha256 = file_digest(part)
        tasks.append(StoredTask(name=task.name, sha256=sha256, slot=slot))
        parts[sha256] = part
        self._tasks[sha256, task.name] = task
      stored = self._stored(self._predictor.task_set, tasks)
      self._folder.publish(stored, None, parts)
    return stored

  def _made_ready(self, stored: StoredSet) -> TaskSet:
    self._require_same(self._predictor.backbone.id, stored.backbone)
    by_slot = {one.slot: self._load(one) for one in stored.tasks}
    ready, _ = self._predictor.make_ready(by_slot, stored.version)
    self._require_same(ready.preprocessing, stored.preprocessing)
    return ready

  def _show(self, stored: StoredSet, ready: TaskSet) -> None:
    self._predictor.show(ready)
    self._shown = stored
    self.newest, self.problem, self._failed = stored.version, "", None
    self._tasks = {
      (one.sha256, one.name): ready.by_slot[one.slot] for one in stored.tasks
    }
    if self._loop:
      with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
        self._loop.call_soon_threadsafe(self._tell)

  def _tell(self) -> None:
    newer, self._newer = self._newer, asyncio.Event()
    newer.set()

  def _loaded(self, tasks: Iterable[StoredTask]) -> dict[int, Task]:
    try:
      return {one.slot: self._load(one) for one in tasks}
    except TaskError as error:
      raise RequestError(
        500, f"the current tasks cannot be loaded: {error} Nothing has changed."
      ) from error

  def _readable(self, tasks: Iterable[StoredTask]) -> dict[int, Task]:
    found = {}
    for one in tasks:
      with contextlib.suppress(TaskError):
        found[one.slot] = self._load(one)
    return found

  def _load(self, one: StoredTask) -> Task:
    """The task of an entry; a task that answers is not loaded again."""
    if task := self._tasks.get((one.sha256, one.name)):
      return task
    path = self._folder.file(one.sha256)
    shown = f"the file of task {one.name!r} in --state_dir"
    try:
      if file_digest(path) != one.sha256:
        raise TaskError(
          f"{shown} is damaged: {path.name} has another SHA-256. Put it back, "
          "or remove the task."
        )
      task = store.load_task(path, self._predictor.backbone)
    except OSError as error:
      raise TaskError(
        f"{shown}, {path.name}, cannot be read: {error.strerror}."
      ) from error
    except TaskError as error:
      raise TaskError(str(error).replace(str(path), shown)) from error
    return sets.named(task, one.name)

  def _not_older(self, newest: StoredSet | None) -> StoredSet:
    """The set of the folder, unless it lost sets that have answered here."""
    shown = self._shown
    if newest and (newest == shown or newest.version > shown.version):
      return newest
    found = f"version {newest.version}" if newest else "no set"
    raise ConfigError(
      f"--state_dir has {found}, and version {shown.version} answers here: "
      "set.json was replaced. Put it back, or start all servers again."
    )

  def _require_same(self, found: object, wanted: object) -> None:
    """Refuse a folder of another backbone or preprocessing of images."""
    if found != wanted:
      raise ConfigError(
        f"--state_dir {self._folder.root} is of {wanted}, and this server of "
        f"{found}: give it another --state_dir, or the same backbone and tasks."
      )

  def _require_finite(self, name: str, ready: TaskSet) -> None:
    """Raise `TaskError` for a task that overflows for a grey image."""
    side = self._predictor.backbone.config.image_size
    has_head = bool(self._predictor.backbone.config.num_classes)
    grey = np.zeros((1, side, side, 3), np.float32)
    # As requests do, so that nothing is compiled for it.
    answer = self._predictor.predict_pixels(
      grey, original=has_head, task_set=ready
    )
    answer.activated(name)

"""Let one server follow the changes of a folder of tasks, and make changes.

The server prepares a new set of tasks while the old set still answers. A task
that cannot be loaded, or does not fit other tasks, is listed in `problems`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memory_vit.errors import (
  ConfigError,
  MemoryVitError,
  TaskError,
  UnknownTask,
)
from memory_vit.model.task import NAME_RULE, is_name
from memory_vit.prediction import task_set as sets
from memory_vit.runtime import files
from memory_vit.runtime.messages import name_list, one_line
from memory_vit.serving.request_error import RequestError, busy
from memory_vit.serving.task_folder import Stamp, TaskFolder, stamp_of
from memory_vit.tasks import compose, store
from memory_vit.tasks.slots import first_free, suits

if TYPE_CHECKING:
  from pathlib import Path

  from memory_vit.model.task import Task
  from memory_vit.prediction import Predictor, TaskSet

POLL_SECONDS = 1.0
_WAIT_SECONDS = 0.05  # between checks while a request waits for a change
# Seconds between attempts to load tasks that could not be loaded.
_AGAIN_SECONDS = 10.0
NO_TASK = "none"  # in place of the digest of a task that is not served
ALL_TASKS = "*"  # key in `problems` for a problem that concerns all tasks
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Changed:
  """A change that was made; `action` is "add", "replace" or "remove".

  `digest` is "" if a removed task did not answer; for `grew` and `compiled` see
  `prediction.task_set.Change`.
  """

  action: str
  name: str
  digest: str
  grew: bool
  compiled: int


class _Stored(NamedTuple):
  """State of a task file: its stamp, and the last task loaded from it.

  `problem` says why the latest attempt to load failed; "" if it succeeded.
  """

  stamp: Stamp
  task: Task | None
  problem: str


class TaskFollower:
  """Lets a predictor answer with the tasks of a folder, and changes the folder.

  Attributes:
    problems: {task name: why this server cannot use the file of the task}; a
      problem of `ALL_TASKS` keeps changes of the folder from taking effect.
  """

  def __init__(self, predictor: Predictor, folder: TaskFolder) -> None:
    """Serve the folder's tasks; a new folder gets the predictor's tasks."""
    self.problems: dict[str, str] = {}
    self._predictor, self._folder = predictor, folder
    # A thread that takes both locks takes the folder's lock before this lock.
    self._lock = threading.Lock()
    self._stored: dict[str, _Stored] = {}
    self._tried: dict[str, Stamp] = {}
    self._again = 0.0
    self._wake = asyncio.Event()
    self._closed = False
    initial = predictor.task_set
    try:
      folder.begin(initial.by_slot.values())
    except RequestError as error:  # another process holds the folder's lock
      raise ConfigError(f"--state_dir: {error.message}") from error
    self._refresh()
    self._require_usable(initial)

  def close(self) -> None:
    """Ignore further changes, and remove the folder if it is temporary.

    This does not wait for the work of other threads.
    """
    self._closed = True  # first, so that `look` ignores the removal of files
    self._folder.close()

  async def follow(self) -> None:
    """Check the folder for changes once a second, until cancelled."""
    while True:
      await asyncio.to_thread(self.look)
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)
      self._wake.clear()

  async def until(self, name: str, digest: str, seconds: float) -> None:
    """Wait until the task has this digest; at the timeout, raise status 503."""
    end = time.monotonic() + seconds
    while (shown := self._digest(name)) != digest:
      self._wake.set()
      if time.monotonic() > end:
        problem = self.problems.get(name) or self.problems.get(ALL_TASKS, "")
        raise busy(
          f"on this server, task {name!r} has the digest {shown}, not "
          f"{digest}. {problem}",
          1,
        )
      await asyncio.sleep(_WAIT_SECONDS)

  def look(self) -> None:
    """Serve the tasks of the folder if they changed, or record the problem."""
    with self._lock:
      try:
        stamps = self._folder.stamps()
        is_due = self.problems and time.monotonic() >= self._again
        if stamps == self._tried and not is_due:
          return
        self._tried, self._again = stamps, time.monotonic() + _AGAIN_SECONDS
        self._refresh()
      except Exception as error:  # for example, out of memory
        if self._closed:
          return
        is_ours = isinstance(error, MemoryVitError)
        reason = one_line(str(error)) or type(error).__name__
        self._note({**self.problems, ALL_TASKS: reason}, traceback=not is_ours)

  def put(self, name: str, content: bytes, shown: str) -> Changed:
    """Add or replace a task for all servers; errors name the file `shown`."""
    with self._changing() as answering:
      self._folder.part.write_bytes(content)
      files.sync(self._folder.part)
      task = self._loaded(self._folder.part, name, shown)
      is_new = name not in answering.slots
      if not is_new:
        # Raise if tasks that attend to the old task do not fit the new task.
        sets.with_replaced(answering.by_slot, name, task)
      stamp = stamp_of(self._folder.part.stat())
      stored = {**self._stored, name: _Stored(stamp, task, "")}
      by_slot, problems = self._placed(stored)
      if name in problems:
        raise TaskError(problems[name])
      ready, change = self._predictor.make_ready(by_slot)
      self._require_finite(name, ready)
      self._folder.show_part(name)
      self._show(stored, ready, problems)
    action = "add" if is_new else "replace"
    digest = ready.digests[name]
    return Changed(action, name, digest, change.grew, change.compiled)

  def remove(self, name: str) -> Changed:
    """Remove a task for all servers, even if its file is damaged."""
    with self._changing() as answering:
      if name not in self._stored:
        raise UnknownTask(f"there is no task {name!r}.", tuple(self._stored))
      stored = {n: file for n, file in self._stored.items() if n != name}
      tasks = {n: file.task for n, file in stored.items() if file.task}
      attending = [n for n, t in tasks.items() if name in t.spec.attends_to]
      if attending:
        raise TaskError(
          f"task {name!r} cannot be removed, because other tasks attend to it: "
          f"first remove {name_list(attending)}."
        )
      by_slot, problems = self._placed(stored)
      ready, change = self._predictor.make_ready(by_slot)
      self._folder.remove(name)
      self._show(stored, ready, problems)
    digest = answering.digests.get(name, "")
    return Changed("remove", name, digest, change.grew, change.compiled)

  @contextlib.contextmanager
  def _changing(self) -> Iterator[TaskSet]:
    with self._folder.changing(), self._lock:
      if self._closed:
        raise busy("the server is stopping.", 5)
      self._refresh()
      yield self._predictor.task_set

  def _refresh(self) -> None:
    """Serve the tasks of the folder; read only changed files."""
    # Repeat until two listings agree: files may change while they are read.
    seen = None
    while seen != (stamps := self._folder.stamps()):
      seen = stamps
      self._stored = {
        name: self._read(name, stamp) for name, stamp in stamps.items()
      }
    by_slot, problems = self._placed(self._stored)
    ready = self._predictor.task_set
    if {*map(id, by_slot.values())} != {*map(id, ready.by_slot.values())}:
      ready, _ = self._predictor.make_ready(by_slot)
    self._show(self._stored, ready, problems)

  def _read(self, name: str, stamp: Stamp) -> _Stored:
    known = self._stored.get(name)
    if known and known.stamp == stamp and not known.problem:
      return known
    try:
      if not is_name(name):
        raise TaskError(f"the file's name is invalid: expected {NAME_RULE}.")
      path = self._folder.path(name)
      return _Stored(stamp, self._loaded(path, name, path.name), "")
    except (MemoryVitError, OSError) as error:
      return _Stored(stamp, known.task if known else None, one_line(str(error)))

  def _loaded(self, path: Path, name: str, shown: str) -> Task:
    try:
      return sets.named(store.load_task(path, self._predictor.backbone), name)
    except TaskError as error:
      raise TaskError(str(error).replace(str(path), shown)) from error

  def _placed(
    self, stored: Mapping[str, _Stored]
  ) -> tuple[dict[int, Task], dict[str, str]]:
    """Return ({slot: task} of tasks that fit together, {task name: problem}).

    Tasks that are already served take precedence. Each of them keeps its slot
    if the slot still suits it.
    """
    slots = self._predictor.task_set.slots
    names = sorted(stored, key=lambda name: (name not in slots, name))
    loaded = [task for name in names if (task := stored[name].task)]
    tasks, problems = _fitting(loaded)
    kept_slots = {
      task.name: slots[task.name]
      for task in tasks
      if task.name in slots and suits(slots[task.name], task.spec)
    }
    by_slot = {kept_slots[t.name]: t for t in tasks if t.name in kept_slots}
    for task in tasks:
      if task.name not in kept_slots:
        by_slot[first_free(task.spec, by_slot)] = task
    problems |= {n: file.problem for n, file in stored.items() if file.problem}
    return by_slot, problems

  def _show(
    self,
    stored: Mapping[str, _Stored],
    ready: TaskSet,
    problems: dict[str, str],
  ) -> None:
    if self._closed:
      return
    self._predictor.show(ready)
    held = {task.name: task for task in ready.by_slot.values()}
    self._stored = {
      name: file._replace(task=held.get(name, file.task))
      for name, file in stored.items()
    }
    self._tried = {name: file.stamp for name, file in stored.items()}
    self._note(problems)

  def _note(self, problems: dict[str, str], traceback: bool = False) -> None:
    for name, reason in problems.items():
      if reason != self.problems.get(name):
        logger.error("task %s of --state_dir: %s", name, reason,
                     exc_info=traceback)  # fmt: skip
    self.problems = problems

  def _digest(self, name: str) -> str:
    return self._predictor.task_set.digests.get(name, NO_TASK)

  def _require_usable(self, initial: TaskSet) -> None:
    """Raise if the stored tasks all have problems, or do not fit `initial`.

    They do not fit if they need another preprocessing than the tasks in
    `initial`. A folder without tasks is no error.
    """
    shown, problem = self._predictor.task_set, ""
    if self.problems and not shown.names:
      name, reason = next(iter(self.problems.items()))
      problem = f"has no task that can be loaded here; {name}: {reason}"
    actual, wanted = shown.preprocessing, initial.preprocessing
    if initial.names and shown.names and actual != wanted:
      problem = f"has tasks that need {actual}, but --task needs {wanted}."
    if problem:
      raise ConfigError(
        f"--state_dir {self._folder.root} {problem} Give another --state_dir, "
        "or a backbone and tasks that fit the stored tasks."
      )
    if unused := [
      name
      for name, digest in initial.digests.items()
      if shown.digests.get(name) != digest
    ]:
      logger.warning(
        "the tasks in --state_dir differ from --task, and only they answer: %s "
        "of --task are not used", name_list(unused),
      )  # fmt: skip

  def _require_finite(self, name: str, ready: TaskSet) -> None:
    """Raise `TaskError` if the task's outputs on grey pixels are not finite."""
    side = self._predictor.backbone.config.image_size
    has_head = bool(self._predictor.backbone.config.num_classes)
    grey = np.zeros((1, side, side, 3), np.float32)
    # Requests set `original` to the same value. With another value, JAX would
    # compile a program that no request uses.
    answer = self._predictor.predict_pixels(
      grey, original=has_head, task_set=ready
    )
    answer.activated(name)


def _fitting(tasks: Sequence[Task]) -> tuple[list[Task], dict[str, str]]:
  """Return (tasks that fit together, {name of a task left out: problem})."""
  with contextlib.suppress(TaskError):
    compose.require_one_pass(tasks)
    return list(tasks), {}
  fitting: dict[str, Task] = {}
  problems = {}
  for task in tasks:
    try:
      family = {t.name: t for t in compose.with_parents(tasks, task.name)}
      compose.require_one_pass([*{**fitting, **family}.values()])
      fitting |= family
    except TaskError as error:
      problems[task.name] = one_line(str(error))
  return list(fitting.values()), problems

"""The folder of tasks that servers share: its files are the tasks that answer.

STATE/tasks/NAME.safetensors   a task, under the name by which it answers
STATE/.part.safetensors        a task that a change is checking
STATE/.new/                    the first tasks, while they are written
STATE/.lock                    held during a change, and never removed

One rename publishes a task, or all first tasks at once. If a killed process
leaves `.part.safetensors` or `.new/`, the next change or start removes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from memory_vit.errors import ConfigError
from memory_vit.model.task import Task
from memory_vit.runtime import files, lock, paths
from memory_vit.runtime.messages import escaped
from memory_vit.serving.request_error import busy
from memory_vit.tasks import store

_SUFFIX = ".safetensors"
# Maximum time to wait until another change, which may compile programs, ends.
_LOCK_SECONDS = 30.0
# Inode, size and modification time of a file; replacing the file changes them.
Stamp = tuple[int, int, int]
logger = logging.getLogger(__name__)


class TaskFolder:
  """Lists and changes the task files of a folder, one change at a time."""

  def __init__(self, state_dir: str | None) -> None:
    """Create the directory, or a temporary directory if `state_dir` is None."""
    self.close: Callable[[], object] = lambda: None
    if state_dir is None:
      self.root = Path(tempfile.mkdtemp(prefix="memory_vit_serve-"))
      # Remove the directory even if the application is created but never run.
      self.close = weakref.finalize(
        self, shutil.rmtree, self.root, ignore_errors=True
      )
    else:
      self.root = paths.local(state_dir, "--state_dir").absolute()
    paths.make_directory(self.root, "--state_dir")
    self.part = self.root / f".part{_SUFFIX}"
    self._tasks = self.root / "tasks"

  def begin(self, tasks: Iterable[Task]) -> None:
    """Write the first tasks, unless the folder already has tasks."""
    if self._tasks.is_dir():
      return
    new = self.root / ".new"
    with files.writing(self.root), self.changing():
      # Look again: another process may have begun this folder meanwhile.
      if self._tasks.is_dir():
        return
      shutil.rmtree(new, ignore_errors=True)
      try:
        new.mkdir()
        for task in tasks:
          store.save_task(task, new / f"{task.name}{_SUFFIX}")
        files.sync(new)
        new.rename(self._tasks)
        files.sync(self.root)
      finally:
        shutil.rmtree(new, ignore_errors=True)

  def path(self, name: str) -> Path:
    return self._tasks / f"{name}{_SUFFIX}"

  def stamps(self) -> dict[str, Stamp]:
    """Return {task name: stamp of its file}.

    One listing may mix old and new files; two equal listings in a row do not.
    """
    stamps = {}
    try:
      with os.scandir(self._tasks) as entries:
        for entry in entries:
          if entry.name.endswith(_SUFFIX) and entry.name[0] != ".":
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
              stamp = stamp_of(_about(entry))
              stamps[escaped(entry.name.removesuffix(_SUFFIX))] = stamp
    except OSError as error:
      raise ConfigError(
        f"{self._tasks} cannot be read ({error.strerror}): restore this "
        "directory, or give another --state_dir."
      ) from error
    return stamps

  @contextlib.contextmanager
  def changing(self) -> Iterator[None]:
    """Hold the lock on changes while the body runs, then remove file `part`."""
    until = time.monotonic() + _LOCK_SECONDS

    def wait(owner: str) -> None:
      if time.monotonic() > until:
        raise busy(f"{owner or 'another process'} is changing the tasks.", 5)
      time.sleep(0.01)

    with lock.one_at_a_time(self.root / ".lock", wait, "--state_dir"):
      try:
        yield
      finally:
        self.part.unlink(missing_ok=True)

  def show_part(self, name: str) -> None:
    """Publish the synced `part` as a task's file; the caller holds the lock."""
    self.part.replace(self.path(name))
    self._sync()

  def remove(self, name: str) -> None:
    """Remove the file of a task; the caller holds the lock."""
    self.path(name).unlink()
    self._sync()

  def _sync(self) -> None:
    try:
      files.sync(self._tasks)
    except OSError as error:
      # Only warn: the change is made, but a crash of the machine may undo it.
      logger.warning("%s cannot be synced to disk: %s", self._tasks, error)


def _about(entry: os.DirEntry[str]) -> os.stat_result:
  """Return the `stat` of a file; for a broken link, the `stat` of the link."""
  try:
    return entry.stat()
  except OSError:
    return entry.stat(follow_symlinks=False)


def stamp_of(about: os.stat_result) -> Stamp:
  return about.st_ino, about.st_size, about.st_mtime_ns

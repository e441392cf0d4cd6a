"""Where a server keeps the tasks that were added to it, and their uploads.

STATE/tasks/NAME.safetensors   a task that answers under this name
STATE/uploads/                 what is still being received or checked
STATE/.lock                    held by the one server that uses it
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from memory_vit.errors import ConfigError
from memory_vit.runtime import files, lock, paths
from memory_vit.runtime.messages import brief
from memory_vit.tasks import store

if TYPE_CHECKING:
  from memory_vit.model.task import Task

SUFFIX = ".safetensors"
logger = logging.getLogger(__name__)


class TaskStore:
  """Files of tasks below a directory; without one, below a temporary one.

  Attributes:
    is_kept: whether they are there after a restart.
  """

  def __init__(self, state_dir: str | None) -> None:
    """Make the directories, and remove what was never completed.

    Raises:
      ConfigError: where nothing can be written there, or another server uses
        it.
    """
    self._held = contextlib.ExitStack()
    self.is_kept = state_dir is not None
    if state_dir is None:
      self._root = Path(tempfile.mkdtemp(prefix="memory_vit_serve-"))
      # Also where the application is made and never run.
      self._remove = weakref.finalize(
        self, shutil.rmtree, self._root, ignore_errors=True
      )
    else:
      self._root = paths.local(state_dir, "--state_dir").absolute()
      paths.make_directory(self._root, "--state_dir")
      # Before anything is removed that another may be receiving.
      self._held.enter_context(
        lock.one_at_a_time(self._root / ".lock", self._refuse, "--state_dir")
      )
    self._tasks, self._uploads = self._root / "tasks", self._root / "uploads"
    for directory in (self._tasks, self._uploads):
      if directory.is_symlink():
        raise ConfigError(
          f"{directory} is a link, expected a directory: give another "
          "--state_dir."
        )
      paths.make_directory(directory, "--state_dir")
      # Of a server that was killed: each of these names is of this class.
      for part in directory.glob(f".*.part{SUFFIX}"):
        part.unlink()

  def _refuse(self, owner: str) -> None:
    raise ConfigError(
      f"--state_dir {brief(str(self._root))}: {owner or 'another process'} is "
      "using it. End that server, or give another --state_dir."
    )

  @contextlib.contextmanager
  def upload(self) -> Iterator[Path]:
    """Yield the name of a new file for an upload; it is removed after."""
    path = self._uploads / f".{uuid.uuid4().hex}.part{SUFFIX}"
    try:
      yield path
    finally:
      path.unlink(missing_ok=True)

  def kept(self) -> list[tuple[str, Path]]:
    """(name, file) of each task that was added, the longest ago first."""
    found = [path for path in self._tasks.glob(f"*{SUFFIX}")]
    found.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    return [(path.name.removesuffix(SUFFIX), path) for path in found]

  @contextlib.contextmanager
  def keeping(self, name: str, task: Task | bytes) -> Iterator[None]:
    """Write a task, and keep it under a name if the body does not fail.

    Args:
      name: under which it answers.
      task: a loaded one, or the bytes of a file of one.

    Raises:
      TrainingError: where it cannot be written; the body is not run then.
      OSError: where it cannot get its name; the body must be undone then.
    """
    path = self._tasks / f"{name}{SUFFIX}"
    part = self._tasks / f".{uuid.uuid4().hex}.part{SUFFIX}"
    try:
      with files.writing(part):
        if isinstance(task, bytes):
          part.write_bytes(task)
          files.sync(part)
        else:
          store.save_task(task, part, format="safetensors")
      yield
      part.replace(path)
    finally:
      part.unlink(missing_ok=True)
    self._sync()

  @contextlib.contextmanager
  def removing(self, name: str) -> Iterator[None]:
    """Keep the task of this name no longer, if the body does not fail.

    Raises:
      OSError: where its file cannot be removed; the body is not run then.
    """
    path = self._tasks / f"{name}{SUFFIX}"
    # What has such a name is removed at the next start.
    aside = self._tasks / f".{uuid.uuid4().hex}.part{SUFFIX}"
    is_kept = path.exists()
    if is_kept:
      path.replace(aside)
    try:
      yield
    except BaseException:
      if is_kept:
        aside.replace(path)
      raise
    with contextlib.suppress(OSError):
      aside.unlink(missing_ok=True)
    self._sync()

  def _sync(self) -> None:
    """Let names survive a power cut, where the file system can do that."""
    try:
      files.sync(self._tasks)
    except OSError as error:
      logger.warning("%s cannot be synchronized: %s", self._tasks, error)

  def close(self) -> None:
    """Remove what is not kept, and let another server use the directory."""
    if not self.is_kept:
      self._remove()
    self._held.close()

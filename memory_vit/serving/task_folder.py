"""The folder of tasks that servers share.

STATE/set.json                    the tasks that answer: a `StoredSet`
STATE/tasks/SHA256.safetensors    a task, under the SHA-256 of its file
STATE/tasks/.*.part.safetensors   a task that is being received or checked
STATE/.lock                       held during a change, and never removed

Files of tasks never change. A change writes the new ones and then renames
set.json: a reader finds the old set or the new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memory_vit.errors import ConfigError
from memory_vit.model.task import NAME_PATTERN, BackboneId, EvalPreprocessing
from memory_vit.runtime import files, lock, paths
from memory_vit.serving.request_error import busy

SUFFIX = ".safetensors"
# After it, files that no set names are removed: another process may still load
# a file of the last set.
GRACE_SECONDS = 600.0
_LOCK_SECONDS = 30.0  # that a change waits for another, which may compile
_OWN_FILE = re.compile(r"[0-9a-f]{64}\.safetensors|\..*\.part\.safetensors")
logger = logging.getLogger(__name__)


class _Stored(BaseModel):
  model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StoredTask(_Stored):
  """A task of a set: its name, the SHA-256 of its file, and its slot."""

  name: Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")]
  sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
  slot: Annotated[int, Field(ge=0, lt=2**20)]


class StoredSet(_Stored):
  """The content of set.json; `tasks` are in the order of their slots."""

  format_version: Literal[1] = 1
  version: Annotated[int, Field(ge=1)]
  backbone: BackboneId
  preprocessing: EvalPreprocessing
  tasks: tuple[StoredTask, ...]


class TaskFolder:
  """Reads the set of tasks of a folder, and changes it as a whole."""

  def __init__(self, state_dir: str | None) -> None:
    """Make the directories; without a path, in a temporary directory."""
    self.close: Callable[[], object] = lambda: None
    if state_dir is None:
      self.root = Path(tempfile.mkdtemp(prefix="memory_vit_serve-"))
      # Also if the application is made and never run.
      self.close = weakref.finalize(
        self, shutil.rmtree, self.root, ignore_errors=True
      )
    else:
      self.root = paths.local(state_dir, "--state_dir").absolute()
    self._set, self._tasks = self.root / "set.json", self.root / "tasks"
    paths.make_directory(self._tasks, "--state_dir")

  def read(self) -> StoredSet | None:
    """The current set, None before the first; `ConfigError` if unreadable."""
    try:
      return StoredSet.model_validate_json(self._set.read_bytes())
    except FileNotFoundError:
      return None
    except (OSError, ValidationError) as error:
      reason = getattr(error, "strerror", "it is not what a server writes")
      raise ConfigError(
        f"{self._set} cannot be read ({reason}): put back what was there, or "
        "give another --state_dir."
      ) from error

  def file(self, sha256: str) -> Path:
    return self._tasks / f"{sha256}{SUFFIX}"

  @contextlib.contextmanager
  def part(self) -> Iterator[Path]:
    """Yield the name of a new file, which is removed at the end."""
    path = self._tasks / f".{uuid.uuid4().hex}.part{SUFFIX}"
    try:
      yield path
    finally:
      path.unlink(missing_ok=True)

  @contextlib.contextmanager
  def changing(self) -> Iterator[StoredSet | None]:
    """Hold the lock of all changes, and yield the current set."""
    until = time.monotonic() + _LOCK_SECONDS

    def wait(owner: str) -> None:
      if time.monotonic() > until:
        raise busy(f"{owner or 'another process'} is changing the tasks.", 5)
      time.sleep(0.01)

    with lock.one_at_a_time(self.root / ".lock", wait, "--state_dir"):
      yield self.read()

  def publish(
    self, new: StoredSet, old: StoredSet | None, parts: Mapping[str, Path]
  ) -> None:
    """Show a set to all processes, under the lock; `parts` are new files."""
    before = {task.sha256 for task in old.tasks} if old else set()
    after = {task.sha256 for task in new.tasks}
    part = self.root / ".set.json.part"  # that of a killed process is replaced
    try:
      for sha256, path in parts.items():
        files.sync(path)
        path.replace(self.file(sha256))
      files.sync(self._tasks)
      part.write_text(new.model_dump_json(indent=2) + "\n", encoding="utf-8")
      files.sync(part)
      part.replace(self._set)
    except OSError:
      for path in (part, *map(self.file, parts.keys() - before)):
        path.unlink(missing_ok=True)
      raise
    try:
      files.sync(self.root)
    except OSError as error:  # but the set is shown
      logger.warning("%s cannot be synchronized: %s", self.root, error)
    with contextlib.suppress(OSError):
      for sha256 in before - after:  # their grace period begins
        os.utime(self.file(sha256))
      self._collect(after)

  def _collect(self, named: set[str]) -> None:
    """Remove files that no set has named for a while."""
    oldest = time.time() - GRACE_SECONDS
    for path in self._tasks.iterdir():
      is_named = path.name.removesuffix(SUFFIX) in named
      is_own = _OWN_FILE.fullmatch(path.name) is not None
      if is_own and not is_named and path.stat().st_mtime < oldest:
        path.unlink()

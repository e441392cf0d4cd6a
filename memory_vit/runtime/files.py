"""Files and directories that are written whole or not at all.

They survive a power cut: a file is synced to the disk before it is renamed, and
its new name after. All paths may be in a bucket, see `bucket`.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from etils import epy

from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.runtime import bucket
from memory_vit.runtime.messages import brief, shortened

with epy.lazy_imports():
  import jax  # options are checked without it

_NEW, _OLD, _LOCK = "new", "old", "lock"
# In the lock of each scratch directory: hidden directories of users may have
# names that look alike.
SCRATCH_MARK = b"made by memory_vit to replace the directory of this name\n"
# A full disk, or the full quota of a user.
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


def strict_json(text: str) -> Any:
  """Parse JSON; `ValueError` for a key twice, `RecursionError` if too deep."""
  return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    raise ValueError("an object has a key twice")
  return values


def read_object(path: Path, *keys: str) -> Mapping[str, Any]:
  """Read a JSON object with at least these keys, else `ConfigError`."""
  try:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, Mapping) or not values.keys() >= {*keys}:
      expected = f"expected an object with {list(keys)}"
      raise ValueError(f"it holds {brief(values)}, {expected}")
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{path} is not readable ({error}). Give another --workdir, or put back "
      "what was there."
    ) from error
  return values


@contextlib.contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
  """Raise `TrainingError` with the path for `OSError` and these errors."""
  refused: tuple[type[Exception], ...] = (OSError, *errors)
  try:
    yield
  except MemoryVitError:
    raise
  except refused as error:
    # C++ libraries raise their own errors with the text of the system.
    is_full = any(reason in str(error) for reason in _FULL)
    advice = "Make room, and give" if is_full else "Mend that, and give"
    raise TrainingError(
      f"{path} cannot be written: {shortened(str(error))}\n"
      f"What was saved before is unchanged. {advice} the same command again."
    ) from error


def write_json(path: Path, values: Any) -> None:
  """Write JSON atomically, on process 0 alone; a link stays a link."""
  text = json.dumps(values, indent=2, allow_nan=False)
  write_text(path.resolve(), f"{text}\n")


def write_text(path: Path, text: str) -> None:
  """Write a text file as `write_json` does."""
  if jax.process_index() != 0:
    return
  # Always the same name: the file of a killed process is overwritten.
  part = path.with_name(path.name + ".tmp")
  with writing(path), replacing(path, part) as new:
    new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[Path]:
  """Yield a temporary name (`part`) in the directory of `path`; rename it."""
  if bucket.is_in(path):
    with bucket.replacing(path) as part:
      yield part
    return
  part = part or path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
  try:
    yield part
    sync(part)
    part.replace(path)
    sync(path.parent)
  finally:
    part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_directory(
  path: Path, foreign_file: Callable[[Path], str | None] = lambda old: None
) -> Iterator[Path]:
  """Yield a name for a directory, which then replaces `path` as a whole."""
  if bucket.is_in(path):
    with bucket.replacing_directory(path, foreign_file) as new:
      yield new
    return
  tidy(path.parent, path.name)  # of a process that was killed in between
  scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
  new, old = scratch / _NEW, scratch / _OLD
  try:
    with (scratch / _LOCK).open("wb") as lock:
      with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX)  # `tidy` holds it for a moment
      lock.write(SCRATCH_MARK)
      lock.flush()
      yield new
      sync_tree(new)
      if path.exists():
        if reason := _move_away(path, old, foreign_file):
          kept = path.with_name(f"{path.name}.new{scratch.name[-9:]}")
          new.rename(kept)
          raise TrainingError(
            f"{path} {reason}, and is left as it is. What was to take its "
            f"place is complete, in {kept}: move it to where you want it."
          )
        before = old.stat()
        # What one group was allowed, another one is not.
        same_group = before.st_gid == new.stat().st_gid
        with contextlib.suppress(OSError):  # a file system without permissions
          new.chmod(before.st_mode & (0o7777 if same_group else 0o705))
      new.rename(path)
      sync(path.parent)
  finally:
    _settle(scratch, path)


def _move_away(
  path: Path, old: Path, foreign_file: Callable[[Path], str | None]
) -> str:
  """Rename `path` to `old`; return why it must not be replaced, or ""."""
  try:
    path.rename(old)
  except OSError as error:  # it is protected, or mounted from elsewhere
    return f"cannot be replaced ({error.strerror or error})"
  try:
    found = foreign_file(old)  # here nobody adds files
  except OSError as error:
    found = f"what cannot be read: {error.strerror or error}"
  return f"holds something else ({brief(found)})" if found else ""


def tidy(directory: Path, name: str | None = None) -> None:
  """Remove what a killed `replacing_directory` left; restore directories."""
  if bucket.is_in(directory):
    return
  for scratch in directory.glob(".*-????????"):  # as `tempfile` names it
    place = directory / scratch.name[1:-9]
    if name not in (None, place.name) or scratch.is_symlink():
      continue
    # Suppressed: not ours, in use by another process, or no locks. NFS locks
    # only files that are open for writing.
    with contextlib.suppress(OSError):
      with (scratch / _LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.read(len(SCRATCH_MARK) + 1) != SCRATCH_MARK:
          continue
      _settle(scratch, place)


def _settle(scratch: Path, place: Path) -> None:
  """Put the old directory back if its place is free; remove the rest."""
  new, old = scratch / _NEW, scratch / _OLD
  if old.exists() and not os.path.lexists(place):
    old.rename(place)
  if old.exists() and new.exists():
    return  # another process has taken the place
  for part in (old, new):
    shutil.rmtree(part, ignore_errors=True)
  # NFS keeps a file that is open somewhere: a later `tidy` removes it, if the
  # scratch directory still has its lock.
  if not (old.exists() or new.exists()):
    shutil.rmtree(scratch, ignore_errors=True)


def begun(path: Path, prefix: str) -> Path:
  """The name under which a directory is written, until `finish`."""
  return path if bucket.is_in(path) else path.with_name(prefix + path.name)


def finish(scratch: Path, path: Path) -> None:
  """Give a directory from `begun` its name, once its last file is written."""
  if scratch != path:
    scratch.rename(path)
  sync(path.parent)


def is_finished(path: Path, last: str) -> bool:
  """Whether a directory exists; in a bucket, whether its `last` file does."""
  return (path / last if bucket.is_in(path) else path).exists()


def remove_directory(path: Path, prefix: str = "") -> None:
  """Remove a directory; a killed process leaves it under `prefix` + name."""
  if bucket.is_in(path):
    bucket.remove_directory(path)
    return
  gone = path.with_name(prefix + path.name)
  path.rename(gone)
  shutil.rmtree(gone)


def fetched(path: Path) -> contextlib.AbstractContextManager[Path]:
  """Yields a local path: this one, or a copy of what is in a bucket."""
  if bucket.is_in(path):
    return bucket.fetched(path)
  return contextlib.nullcontext(path)


@contextlib.contextmanager
def open_sized(path: Path) -> Iterator[tuple[IO[bytes], int | None]]:
  """Open a file that is no link, with its size; None if it is not regular."""
  if bucket.is_in(path):
    with bucket.open_sized(path) as opened:
      yield opened
    return
  # Without O_NONBLOCK, opening a pipe waits for somebody to write into it.
  flags = os.O_NOFOLLOW | os.O_NONBLOCK
  with open(path, "rb", opener=lambda p, f: os.open(p, f | flags)) as file:
    found = os.fstat(file.fileno())
    yield file, found.st_size if stat.S_ISREG(found.st_mode) else None


class Outbox:
  """A local directory that a library writes, copied to its path in a bucket.

  If the path is local, it is the directory itself.
  """

  def __init__(self, path: Path) -> None:
    self.local = path
    self._bucket_path = path if bucket.is_in(path) else None
    self._sent: dict[Path, tuple[int, int]] = {}  # sizes and times
    if self._bucket_path:
      self.local = Path(tempfile.mkdtemp(prefix="memory-vit-"))

  def send(self) -> None:
    """Copy what has changed."""
    if not self._bucket_path:
      return
    # A library may leave links to nothing, which are no files.
    for file in sorted(filter(Path.is_file, self.local.rglob("*"))):
      found = file.stat()
      version = found.st_size, found.st_mtime_ns
      if self._sent.get(file) != version:
        name = file.relative_to(self.local).as_posix()
        bucket.upload(file, self._bucket_path / name)
        self._sent[file] = version

  def close(self) -> None:
    """Copy what has changed, and remove the local directory."""
    try:
      self.send()
    finally:
      if self._bucket_path:
        shutil.rmtree(self.local, ignore_errors=True)


def sync(path: Path) -> None:
  """Wait until a file, or the names in a directory, survive a power cut."""
  if bucket.is_in(path):
    return
  opened = os.open(path, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def sync_tree(directory: Path) -> None:
  if bucket.is_in(directory):
    return
  for folder, _, names in os.walk(directory):
    for name in names:
      sync(Path(folder) / name)
    sync(Path(folder))

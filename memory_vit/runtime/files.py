"""Files and directories that are written whole or not at all.

They survive a power cut: each file is synced to disk before it is renamed, and
its directory after the rename. All paths may be in a bucket, see `bucket`.
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
  import jax  # lazy: checking options does not need JAX

_NEW, _OLD, _LOCK = "new", "old", "lock"
# Text of the lock file in the hidden directories that `replacing_directory`
# makes. A user's hidden directory may have a similar name, but not this text.
SCRATCH_MARK = b"made by memory_vit to replace the directory of this name\n"
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


def strict_json(text: str) -> Any:
  """Parse JSON; `ValueError` if a key repeats, `RecursionError` if too deep."""
  return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    raise ValueError("an object has a duplicate key")
  return values


def read_object(path: Path, *keys: str) -> Mapping[str, Any]:
  """Read a JSON object; raise `ConfigError` unless it has these keys."""
  try:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, Mapping) or not values.keys() >= {*keys}:
      expected = f"expected an object with {list(keys)}"
      raise ValueError(f"the file holds {brief(values)}, {expected}")
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{path} is not readable ({error}). Give another --workdir, or restore "
      "the file."
    ) from error
  return values


@contextlib.contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
  """Turn `OSError` and `errors` into a `TrainingError` that names the path."""
  refused: tuple[type[Exception], ...] = (OSError, *errors)
  try:
    yield
  except MemoryVitError:
    raise
  except refused as error:
    # Exceptions of C++ libraries have the system's message, but no `errno`.
    is_full = any(reason in str(error) for reason in _FULL)
    advice = "Make room" if is_full else "Remove the cause"
    raise TrainingError(
      f"{path} cannot be written: {shortened(str(error))}\n"
      f"Earlier files are unchanged. {advice}, and give the same command again."
    ) from error


def write_json(path: Path, values: Any) -> None:
  """Write JSON atomically, on process 0 alone; follow a symbolic link."""
  text = json.dumps(values, indent=2, allow_nan=False)
  write_text(path.resolve(), f"{text}\n")


def write_text(path: Path, text: str) -> None:
  """Write a text file atomically, on process 0 alone."""
  if jax.process_index() != 0:
    return
  # The name is fixed, so killed processes leave at most one temporary file.
  part = path.with_name(path.name + ".tmp")
  with writing(path), replacing(path, part) as new:
    new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[Path]:
  """Yield a temporary path, by default beside `path`; rename it to `path`."""
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
  """Yield a path for a new directory, which then replaces `path` as a whole."""
  if bucket.is_in(path):
    with bucket.replacing_directory(path, foreign_file) as new:
      yield new
    return
  tidy(path.parent, path.name)  # remove leftovers of a killed process
  scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
  new, old = scratch / _NEW, scratch / _OLD
  try:
    with (scratch / _LOCK).open("wb") as lock:
      # `tidy` of another process may hold the lock: wait until it is free.
      # In a file system without locks, `flock` raises `OSError`.
      with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
      lock.write(SCRATCH_MARK)
      lock.flush()
      yield new
      sync_tree(new)
      if path.exists():
        if reason := _move_away(path, old, foreign_file):
          saved = path.with_name(f"{path.name}.new{scratch.name[-9:]}")
          new.rename(saved)
          raise TrainingError(
            f"{path} {reason}, and is left as it is. The new output is "
            f"complete, in {saved}: move that directory to where you want it."
          )
        before = old.stat()
        # If the group has changed, drop the permissions that the old group had.
        same_group = before.st_gid == new.stat().st_gid
        with contextlib.suppress(OSError):  # some file systems have no modes
          new.chmod(before.st_mode & (0o7777 if same_group else 0o705))
      new.rename(path)
      sync(path.parent)
  finally:
    _settle(scratch, path)


def _move_away(
  path: Path, old: Path, foreign_file: Callable[[Path], str | None]
) -> str:
  """Rename `path` to `old`; return "", or why `path` must not be replaced.

  Even if a reason is returned, `path` may have been renamed. In that case, the
  caller renames `old` back to `path`, with `_settle`.
  """
  try:
    path.rename(old)
  except OSError as error:  # `path` is protected, or a mount point
    return f"cannot be replaced ({error.strerror or error})"
  # Check after renaming: other programs may write to `path`, but not to `old`.
  try:
    foreign = foreign_file(old)
  except OSError as error:
    foreign = f"files that cannot be read: {error.strerror or error}"
  return f"holds unknown files ({brief(foreign)})" if foreign else ""


def tidy(directory: Path, name: str | None = None) -> None:
  """Clean up after a killed `replacing_directory`; put old directories back."""
  if bucket.is_in(directory):
    return
  for scratch in directory.glob(".*-????????"):  # created by `mkdtemp`
    place = directory / scratch.name[1:-9]
    if name not in (None, place.name) or scratch.is_symlink():
      continue
    # An `OSError` means that `scratch` has no lock file that we may write, that
    # another process holds the lock, or that the file system has no locks. The
    # mode is "r+b", because NFS locks only files that are open for writing.
    with contextlib.suppress(OSError):
      with (scratch / _LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.read(len(SCRATCH_MARK) + 1) != SCRATCH_MARK:
          continue
      _settle(scratch, place)


def _settle(scratch: Path, place: Path) -> None:
  """Restore `place`, if missing, from `scratch`; then remove `scratch`."""
  new, old = scratch / _NEW, scratch / _OLD
  if old.exists() and not os.path.lexists(place):
    old.rename(place)
  if old.exists() and new.exists():
    return  # keep `old` and `new`: another process has made `place`
  for part in (old, new):
    shutil.rmtree(part, ignore_errors=True)
  # NFS does not remove open files. If `old` or `new` is left, keep `scratch`
  # with its lock file, by which a later call of `tidy` recognizes `scratch`.
  if not (old.exists() or new.exists()):
    shutil.rmtree(scratch, ignore_errors=True)


def begun(path: Path, prefix: str) -> Path:
  """Return the path for writing a directory, which `finish` then renames."""
  return path if bucket.is_in(path) else path.with_name(prefix + path.name)


def finish(scratch: Path, path: Path) -> None:
  """Rename a directory from `begun` to `path`, once all files are written."""
  if scratch != path:
    scratch.rename(path)
  sync(path.parent)


def is_finished(path: Path, last: str) -> bool:
  """Return whether a directory exists; in a bucket, whether `last` exists."""
  return (path / last if bucket.is_in(path) else path).exists()


def remove_directory(path: Path, prefix: str = "") -> None:
  """Remove a directory; if it is local, first add `prefix` to its name."""
  if bucket.is_in(path):
    bucket.remove_directory(path)
    return
  gone = path.with_name(prefix + path.name)
  path.rename(gone)
  shutil.rmtree(gone)


def fetched(path: Path) -> contextlib.AbstractContextManager[Path]:
  """Yield a local path: `path` itself, or a temporary copy from the bucket."""
  if bucket.is_in(path):
    return bucket.fetched(path)
  return contextlib.nullcontext(path)


@contextlib.contextmanager
def open_sized(path: Path) -> Iterator[tuple[IO[bytes], int | None]]:
  """Yield an open file and its size (None if not regular); refuse links."""
  if bucket.is_in(path):
    with bucket.open_sized(path) as opened:
      yield opened
    return
  # Without O_NONBLOCK, opening a pipe would wait for a process that writes.
  flags = os.O_NOFOLLOW | os.O_NONBLOCK
  with open(path, "rb", opener=lambda p, f: os.open(p, f | flags)) as file:
    status = os.fstat(file.fileno())
    yield file, status.st_size if stat.S_ISREG(status.st_mode) else None


class Outbox:
  """A local directory that a library writes to, and that is sent to a bucket.

  If `path` is local, the library writes to `path` itself and nothing is sent.
  """

  def __init__(self, path: Path) -> None:
    self.local = path
    self._bucket_path = path if bucket.is_in(path) else None
    self._sent: dict[Path, tuple[int, int]] = {}  # {file: (size, mtime)}
    if self._bucket_path:
      self.local = Path(tempfile.mkdtemp(prefix="memory-vit-"))

  def send(self) -> None:
    """Send files that are new or have changed."""
    if not self._bucket_path:
      return
    # `is_file` leaves out broken links, which a library may create.
    for file in sorted(filter(Path.is_file, self.local.rglob("*"))):
      status = file.stat()
      version = status.st_size, status.st_mtime_ns
      if self._sent.get(file) != version:
        name = file.relative_to(self.local).as_posix()
        bucket.upload(file, self._bucket_path / name)
        self._sent[file] = version

  def close(self) -> None:
    """Send files that are new or have changed; remove a temporary directory."""
    try:
      self.send()
    finally:
      if self._bucket_path:
        shutil.rmtree(self.local, ignore_errors=True)


def sync(path: Path) -> None:
  """Sync a local file, or the entries of a local directory, to disk."""
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

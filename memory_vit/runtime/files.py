"""Files and directories that are written whole or not at all.

They survive a power cut: a file is synced to the disk before it is renamed, and
its new name after.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epy

from memory_vit.errors import ConfigError, MemoryVitError, TrainingError
from memory_vit.runtime.messages import brief, shortened

with epy.lazy_imports():
  import jax  # The options are checked without it.

# As `tempfile.mkdtemp` ends a name.
_SCRATCH = re.compile(r"\.(?P<name>.+)-[a-z0-9_]{8}")
_NEW, _OLD, _LOCK = "new", "old", "lock"
# In the lock of each scratch of `replacing_directory`: users have hidden
# directories whose names and contents look alike.
SCRATCH_MARK = "made by memory_vit to replace the directory of this name\n"
# A disk, or the part of it that a user may have.
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


def strict_json(text: str) -> Any:
  """Parse JSON in which no object has a key twice.

  Raises:
    ValueError: where it is none.
    RecursionError: for brackets in brackets, which end the stack.
  """
  return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    raise ValueError("an object has a key twice")
  return values


def read_json(path: Path) -> Any:
  """Read a file that `write_json` wrote.

  Raises:
    ConfigError: where it is not readable.
  """
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{path} is not readable ({error}). Give another --workdir, or put back "
      "what was there."
    ) from error


def read_object(path: Path, *keys: str) -> Mapping[str, Any]:
  """Read a JSON object that has at least these keys.

  Raises:
    ConfigError: where it is not readable, or something else.
  """
  values = read_json(path)
  if not isinstance(values, Mapping) or not values.keys() >= {*keys}:
    raise ConfigError(
      f"{path} holds {brief(values)}, expected an object with {list(keys)}. "
      "Give another --workdir, or put back what was there."
    )
  return values


@contextlib.contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
  """Raise a `TrainingError` that names the file where it cannot be written.

  In place of an `OSError`, as on a full disk, or of `errors` of its writer.
  """
  refused: tuple[type[Exception], ...] = (OSError, *errors)
  try:
    yield
  except MemoryVitError:
    raise
  except refused as error:
    # Libraries of C++ raise their own errors, with the text of the system's.
    is_full = any(reason in str(error) for reason in _FULL)
    advice = "Make room, and give" if is_full else "Mend that, and give"
    raise TrainingError(
      f"{path} cannot be written: {shortened(str(error))}\n"
      f"What was saved before is as it was. {advice} the same command again."
    ) from error


def write_json(path: Path, values: Any) -> None:
  """Write a JSON file atomically, on process 0 alone.

  Raises:
    TrainingError: where it cannot be written.
  """
  write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
  """Write a text file as `write_json` does."""
  if jax.process_index() != 0:
    return
  # Always the same name: what a killed process left is written over.
  part = path.with_name(path.name + ".tmp")
  with writing(path), replacing(path, part):
    part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[Path]:
  """Yield a file to write, and move it to `path` once all went well.

  Args:
    path: of the file that is made or replaced, in an existing directory.
    part: the name to write under, in the same directory; by default one that no
      other process has.
  """
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
  """Yield a name for a directory, which takes the place of `path` as a whole.

  What lies at `path`, in an existing directory, is moved out of the way until
  the new one is in its place, which gets its owner and permissions. If the
  process is killed in between, the next one for this path puts it back, or
  `tidy`.

  Args:
    path: of the directory that is made or replaced.
    foreign_file: directory -> what is in it that must not be lost. It is asked
      once the old directory is out of the way, where nobody adds to it.

  Raises:
    TrainingError: where a foreign file is in the old directory, or it cannot be
      moved. It stays, and the new one lies beside it, where the message
      says.
  """
  tidy(path.parent, path.name)
  scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
  new, old = scratch / _NEW, scratch / _OLD
  try:
    with (scratch / _LOCK).open("w") as lock:
      with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      lock.write(SCRATCH_MARK)
      lock.flush()
      yield new
      sync_tree(new)
      if path.exists():
        _move_away(path, old, new, foreign_file)
        if old.is_dir():
          _copy_permissions(old, new)
      new.rename(path)
      sync(path.parent)
  finally:
    _settle(scratch, path)


def _move_away(
  path: Path, old: Path, new: Path, foreign_file: Callable[[Path], str | None]
) -> None:
  """Move a directory out of the way of a new one, or keep both and say so."""
  try:
    path.rename(old)
  except (
    OSError
  ) as error:  # nobody may write to it; it is mounted from elsewhere
    reason = f"cannot be replaced ({error.strerror or error}),"
  else:
    try:
      found = foreign_file(old)
    except OSError as error:
      found = f"what cannot be read: {error.strerror or error}"
    if not found:
      return
    old.rename(path)
    reason = f"holds something else ({brief(found)}),"
  raise TrainingError(
    f"{path} {reason} and is left as it is. What was to take its place is "
    f"complete, in {_keep_beside(path, new)}: move it to where you want it."
  )


def tidy(directory: Path, name: str | None = None) -> None:
  """Remove what a killed `replacing_directory` left in a directory.

  What had been moved out of the way is put back. No link is followed, and
  nothing else is touched: neither what other users or programs have made, nor
  what a process is writing now.

  Args:
    directory: in which paths were replaced.
    name: of the only path that is looked after; by default all are.
  """
  for scratch in directory.glob(".*-????????"):
    found = _SCRATCH.fullmatch(scratch.name)
    if not found or name not in (None, found["name"]):
      continue
    # Somebody is writing it, has removed it by now, or nobody knows: there are
    # file systems without locks.
    with contextlib.suppress(OSError):
      if _is_scratch(scratch):
        # For writing: NFS gives an exclusive lock on no other file.
        with (scratch / _LOCK).open("r+") as lock:
          fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _settle(scratch, directory / found["name"])


def _is_scratch(path: Path) -> bool:
  """Whether a directory is one that `replacing_directory` has made."""
  if path.is_symlink() or not path.is_dir():
    return False
  if path.stat().st_uid != os.geteuid():
    return False
  if not {file.name for file in path.iterdir()} <= {_NEW, _OLD, _LOCK}:
    return False
  with (path / _LOCK).open("rb") as lock:
    return lock.read(len(SCRATCH_MARK) + 1) == SCRATCH_MARK.encode()


def _settle(scratch: Path, place: Path) -> None:
  """Put back what was moved away from a place; remove what is left.

  Where both the old and the new one are there still, somebody else has taken
  the place: neither is removed.
  """
  new, old = scratch / _NEW, scratch / _OLD
  if old.exists() and not os.path.lexists(place):
    old.rename(place)
  if old.exists() and new.exists():
    return
  # On NFS a file that is open somewhere stays: `tidy` removes it another time,
  # which knows the directory by the lock.
  for part in (old, new):
    shutil.rmtree(part, ignore_errors=True)
  if not (old.exists() or new.exists()):
    shutil.rmtree(scratch, ignore_errors=True)


def _copy_permissions(old: Path, new: Path) -> None:
  """Give a directory the owner, group and permissions of another one."""
  found = old.stat()
  mode = stat.S_IMODE(found.st_mode)
  # Another owner is for root alone, who writes for users from a container; in
  # one there are owners and groups that nobody can name.
  with contextlib.suppress(OSError):
    if new.stat().st_uid != found.st_uid:
      os.chown(new, found.st_uid, -1)
  try:
    if new.stat().st_gid != found.st_gid:
      os.chown(new, -1, found.st_gid)
  except OSError:  # what one group might is not for another one
    mode &= ~(stat.S_IRWXG | stat.S_ISGID)
  with contextlib.suppress(OSError):  # a file system without permissions
    new.chmod(mode)


def _keep_beside(path: Path, new: Path) -> Path:
  """Move a new directory beside the one whose place it cannot take."""
  prefix = f"{path.name}.new-"
  kept = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
  new.rename(kept)
  return kept


def sync(path: Path) -> None:
  """Wait until a file, or the names in a directory, survive a power cut."""
  opened = os.open(path, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def sync_tree(directory: Path) -> None:
  """Wait until all that lies in a directory survives a power cut."""
  for folder, _, names in os.walk(directory):
    for name in names:
      sync(Path(folder) / name)
    sync(Path(folder))

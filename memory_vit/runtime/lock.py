"""One working directory, one run."""

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from memory_vit.errors import TrainingError
from memory_vit.runtime import processes

_FILE = ".lock"
_OWNER = re.compile(r"process [0-9]{1,20} on .{1,300}\n")
# Characters that are read of a file that may be anything.
_MOST_READ = 400
# By which a run is told where its lock lies.
_WORKDIR = "--workdir"


@contextlib.contextmanager
def only_run(workdir: Path) -> Iterator[Callable[[], None]]:
  """Keep other runs out of a directory, which is made where it is not there.

  The operating system frees the lock when the process that holds it ends, in
  whatever way; what `.lock` says is for people. Process 0 holds it for all.

  Yields:
    A function that raises a `TrainingError` once `.lock` is not the file any
    more that this run holds, so that another run is let in. All processes must
    call it.

  Raises:
    TrainingError: where another process holds it, the file system has no
      locks, or `.lock` is not a file of ours: that one is left as it is.
  """
  path = workdir / _FILE
  with contextlib.ExitStack() as stack:
    held: list[int] = []

    def take() -> None:
      _make(workdir)
      # Never deleted: two could then hold two files of this name.
      held.append(_open(path, _WORKDIR))
      stack.callback(os.close, held[0])
      _lock(held[0], path)

    def require_held() -> None:
      processes.on_process_0(lambda: _require_same(held[0], path))

    processes.on_process_0(take)
    yield require_held


@contextlib.contextmanager
def one_at_a_time(
  path: Path, wait: Callable[[str], None], option: str
) -> Iterator[None]:
  """Hold the lock of a file, once no other process does.

  Args:
    path: of the file, in an existing directory; it is never deleted.
    wait: is called with the line of the process that holds it, as long as one
      does, and takes its time.
    option: by which users choose where it lies, for messages.

  Raises:
    TrainingError: where the file system has no locks, or the file is not one of
      ours.
  """
  file = _open(path, option)
  try:
    while not _try_lock(file, path, option):
      wait(_read(file).strip() if _is_ours(file) else "")
    _sign(file, path, option)
    yield
  finally:
    os.close(file)


def _make(workdir: Path) -> None:
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise TrainingError(
      f"--workdir {workdir} cannot be made ({error.strerror}): expected a "
      "directory, or a place for one."
    ) from error


def _open(path: Path, option: str) -> int:
  """Open or make `.lock`; return a descriptor.

  No link is followed, and nothing waits for the other end of a pipe: somebody
  else who may write into the directory could name any file of the user there.
  """
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
  try:
    file = os.open(path, flags, 0o666)
  except OSError as error:
    if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
      raise _not_ours(path, option) from error
    raise TrainingError(
      f"{path} cannot be written ({error.strerror}): expected a {option} into "
      "which this user may write."
    ) from error
  found = os.fstat(file)
  if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
    os.close(file)
    raise _not_ours(path, option)
  return file


def _lock(file: int, path: Path) -> None:
  """Lock a file and write into it who did."""
  if not _try_lock(file, path, _WORKDIR):
    owner = _read(file).strip() if _is_ours(file) else ""
    raise TrainingError(
      f"another run is using {path.parent}: {owner or 'unknown'}. "
      f"Wait for it, end it, or give another {_WORKDIR}."
    )
  _sign(file, path, _WORKDIR)


def _try_lock(file: int, path: Path, option: str) -> bool:
  """Lock a file; False where another process has it."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    raise TrainingError(
      f"{path} cannot be locked ({error}): its file system has no "
      f"locks (flock). Give a {option} on another one, or mount it with locks."
    ) from error
  return True


def _sign(file: int, path: Path, option: str) -> None:
  """Write into a locked file who has locked it."""
  if not _is_ours(file):
    raise _not_ours(path, option)
  os.ftruncate(file, 0)
  line = f"process {os.getpid()} on {socket.gethostname()}\n"
  os.pwrite(file, line.encode(), 0)


def _read(file: int) -> str:
  return os.pread(file, _MOST_READ, 0).decode("utf-8", "replace")


def _is_ours(file: int) -> bool:
  """Whether a file holds what a run writes, or nothing yet."""
  text = _read(file)
  return not text or _OWNER.fullmatch(text) is not None


def _not_ours(path: Path, option: str) -> TrainingError:
  return TrainingError(
    f"{path} is not the file by which a run keeps others out (a plain file of "
    "one line, and no link): it is left as it is. Take it away, or give "
    f"another {option}."
  )


def _require_same(file: int, path: Path) -> None:
  """Raise `TrainingError` unless the path still names the open file."""
  with contextlib.suppress(OSError):
    if os.path.samestat(os.fstat(file), os.lstat(path)):
      return
  raise TrainingError(
    f"{path} was taken away or replaced while this run was using the "
    "directory, and another run may be using it now. Nothing more is written. "
    "End all runs there, and give the same command again."
  )

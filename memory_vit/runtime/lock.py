"""A lock that lets only one run at a time use a directory.

The operating system frees the lock however its process ends; the text in the
lock file is only for people. A directory in a bucket has a `lease` instead.
"""

import contextlib
import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from memory_vit.errors import TrainingError
from memory_vit.runtime import bucket, lease, paths, processes

_FILE = ".lock"
_OWNER = re.compile(r"process [0-9]{1,20} on .{1,300}\n")
# Maximum number of bytes to read from the lock file, which may be any file.
_MOST_READ = 400


@contextlib.contextmanager
def only_run(workdir: Path) -> Iterator[Callable[[], None]]:
  """Lock `workdir` for a run of all processes; yield a check of the lock."""

  def refuse(owner: str) -> None:
    raise TrainingError(
      f"another run is using {workdir}: {owner or 'unknown'}. Wait for it, end "
      "it, or give another --workdir."
    )

  with contextlib.ExitStack() as stack:
    held: list[Callable[[], None]] = []

    def take() -> None:
      paths.make_directory(workdir, "--workdir")
      file = workdir / _FILE
      lock = (
        lease.held(file, refuse)
        if bucket.is_in(file)
        else one_at_a_time(file, refuse, "--workdir")
      )
      held.append(stack.enter_context(lock))

    processes.on_process_0(take)
    yield lambda: processes.on_process_0(lambda: held[0]())


@contextlib.contextmanager
def one_at_a_time(
  path: Path, wait: Callable[[str], None], option: str
) -> Iterator[Callable[[], None]]:
  """Hold the lock of a file; yield a check that the file is still at `path`."""
  file = _open(path, option)
  try:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
      raise _not_ours(path, option, "it is hard-linked or is not a plain file")
    # `wait` sleeps or raises.
    while not _try_lock(file, path, option):
      wait(_read(file).strip() if _is_ours(file) else "")
    if not _is_ours(file):
      raise _not_ours(path, option, "the file holds text that no run writes")
    os.ftruncate(file, 0)
    line = f"process {os.getpid()} on {socket.gethostname()}\n"
    # If the disk is full, this line cannot be written, but the lock is held.
    with contextlib.suppress(OSError):
      os.pwrite(file, line.encode(), 0)
    yield lambda: _require_same(file, path)
  finally:
    # Keep the file: after a deletion, two processes could lock different files.
    os.close(file)


def _open(path: Path, option: str) -> int:
  """Return a file descriptor; neither follow links nor wait for pipes."""
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
  try:
    return os.open(path, flags, 0o666)
  except OSError as error:
    raise _not_ours(path, option, error.strerror or str(error)) from error


def _not_ours(path: Path, option: str, reason: str) -> TrainingError:
  return TrainingError(
    f"{path} cannot be the lock that keeps other runs out ({reason}): expected "
    "a plain file that this user may write, or no file. It is left as it is. "
    f"Move it away, or give another {option}."
  )


def _try_lock(file: int, path: Path, option: str) -> bool:
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    raise TrainingError(
      f"{path} cannot be locked ({error}): its file system has no "
      f"locks (flock). Give a {option} on a file system with locks, or mount "
      "this file system with locks."
    ) from error
  return True


def _read(file: int) -> str:
  return os.pread(file, _MOST_READ, 0).decode("utf-8", "replace")


def _is_ours(file: int) -> bool:
  """Return whether a file is empty or holds the line that a run writes."""
  text = _read(file)
  return not text or _OWNER.fullmatch(text) is not None


def _require_same(file: int, path: Path) -> None:
  """Raise `TrainingError` unless the path still names the open file."""
  with contextlib.suppress(OSError):
    if os.path.samestat(os.fstat(file), os.lstat(path)):
      return
  raise TrainingError(
    f"{path} was removed or replaced while this run was using the directory, "
    "and another run may be using the directory now. Nothing more is written. "
    "End all runs there, and give the same command again."
  )

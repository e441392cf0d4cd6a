"""One working directory, one run."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from memory_vit import processes
from memory_vit.errors import TrainingError

_FILE = ".lock"


@contextlib.contextmanager
def only_run(workdir: Path) -> Iterator[None]:
  """Keeps other runs out of a directory, which is made where it is not there.

  The operating system frees the lock when the process that holds it ends, in
  whatever way; what `.lock` says is for people. Of several processes the first
  holds it for all.

  Raises:
    TrainingError: where another process holds it, or the file system has no
      locks.
  """
  with contextlib.ExitStack() as stack:

    def take() -> None:
      workdir.mkdir(parents=True, exist_ok=True)
      # Never deleted: two could then hold two files of this name.
      try:
        file = (workdir / _FILE).open("a+", encoding="utf-8")
      except OSError as error:
        raise TrainingError(
          f"{workdir / _FILE} cannot be opened ({error}): expected a file that "
          "this command may write. Remove it, or give another --workdir."
        ) from error
      _lock(stack.enter_context(file), workdir)

    processes.by_first(take)
    yield


def _lock(file: TextIO, workdir: Path) -> None:
  """Locks a file and writes into it who did."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    raise TrainingError(
      f"another run is using {workdir}: {file.read().strip() or 'unknown'}. "
      "Wait for it, end it, or give another --workdir."
    ) from None
  except OSError as error:
    raise TrainingError(
      f"{workdir / _FILE} cannot be locked ({error}): its file system has no "
      "locks (flock). Give a --workdir on another one, or mount it with locks."
    ) from error
  file.truncate(0)
  file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
  file.flush()

"""End a process whose input has stalled."""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

# Exit status of a process that `end_process` ends: EX_IOERR of sysexits.h.
EXIT_STALLED = 74


@contextlib.contextmanager
def limit(seconds: float, what: str) -> Iterator[None]:
  """Call `end_process` if the body takes longer; 0 seconds mean no limit."""
  if not seconds:
    yield
    return
  # Use a thread, because exceptions do not interrupt native code that waits.
  timer = threading.Timer(seconds, end_process, [seconds, what])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def end_process(seconds: float, what: str) -> None:
  """Dump all stacks to stderr, and end the process with `EXIT_STALLED`."""
  # Use the original stderr, because notebooks and tests replace `sys.stderr` by
  # an object without a file descriptor.
  stderr = sys.__stderr__ or sys.stderr
  faulthandler.dump_traceback(file=stderr, all_threads=True)
  print(
    f"error: no batch of {what} for {seconds:g} s: the input has stalled. The "
    "stack traces above show what the process was doing; check the disk or the "
    "network that holds the data. Saved states are intact; the same command "
    "resumes. stall_timeout sets the limit; 0 means no limit.",
    file=stderr,
    flush=True,
  )
  sys.stdout.flush()
  os._exit(EXIT_STALLED)

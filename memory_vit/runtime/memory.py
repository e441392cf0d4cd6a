"""Return freed memory to the system."""

import contextlib
import ctypes
import gc


def trim() -> None:
  """Return freed memory to the system, which glibc keeps otherwise.

  What requests leave in cycles is freed first: with the thresholds of commands
  (`commands._COLLECTED`) Python itself would wait for hours.
  """
  gc.collect()
  with contextlib.suppress(AttributeError, OSError, TypeError):
    ctypes.CDLL(None).malloc_trim(0)

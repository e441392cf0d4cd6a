"""Return freed memory to the system."""

import contextlib
import ctypes
import gc


def trim() -> None:
  """Return freed memory to the system, which glibc keeps otherwise.

  Garbage is collected first: commands let Python do that rarely
  (`commands._COLLECTED`), and without it a server kept some 300 MiB of large
  forms that it had refused (`benchmarks.attacks`).
  """
  gc.collect()
  with contextlib.suppress(AttributeError, OSError, TypeError):
    ctypes.CDLL(None).malloc_trim(0)

"""How much memory something takes, C++ included."""

import pytest


def start_rss() -> int:
  """The memory of this process, in bytes; from now on the peak is noted."""
  try:
    with open("/proc/self/clear_refs", "w") as file:
      file.write("5")
  except OSError:
    pytest.skip("this system does not forget its greatest memory")
  return peak_rss()


def peak_rss() -> int:
  """The most memory that this process had since `start_rss`, in bytes."""
  with open("/proc/self/status") as file:
    [line] = [x for x in file if x.startswith("VmHWM")]
  return 1024 * int(line.split()[1])

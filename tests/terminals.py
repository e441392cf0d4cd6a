"""A terminal of which stderr is one, and what is to be seen on it."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence

import quick
from conftest import ROOT

# Bars appear at once: what is done here is over soon.
_AT_ONCE = """
import runpy
from memory_vit.runtime import progress_bar
progress_bar.ProgressBar.__init__.__kwdefaults__["delay"] = 0.0
runpy.run_module("memory_vit", run_name="__main__", alter_sys=True)
"""


def screen(text: str) -> list[str]:
  """The lines that a terminal shows of a text; the last one has the cursor."""
  lines, row, column = [""], 0, 0
  for character in text.replace("\x1b[A", "\x00"):
    if character == "\n":
      row, column = row + 1, 0
      lines += [""] * (row + 1 - len(lines))
    elif character == "\r":
      column = 0
    elif character == "\x00":
      row -= 1
    else:
      line = lines[row].ljust(column)
      lines[row] = line[:column] + character + line[column + 1 :]
      column += 1
  return [line.rstrip() for line in lines]


class Command:
  """A command of this package whose stderr is a terminal, and stdout is not.

  Attributes:
    err: what came on stderr by now.
    out: on stdout, after `wait`.
  """

  def __init__(
    self,
    name: str,
    *arguments: object,
    environment: dict[str, str] | None = None,
  ) -> None:
    """Starts `memory-vit NAME`."""
    self.err = self.out = ""
    ours, its = pty.openpty()
    size = struct.pack("HHHH", 40, 120, 0, 0)  # rows, columns
    fcntl.ioctl(its, termios.TIOCSWINSZ, size)
    line: Sequence[str] = [sys.executable, "-c", _AT_ONCE, name]
    self.process = subprocess.Popen(
      [*line, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE,
      stderr=its, text=True,
      env={**os.environ, "TERM": "xterm", "COLUMNS": "120",
           "XLA_FLAGS": quick.XLA_FLAGS, **(environment or {})},
    )  # fmt: skip
    os.close(its)
    self._reader = threading.Thread(target=self._read, args=(ours,))
    self._reader.start()

  def __enter__(self) -> "Command":
    return self

  def __exit__(self, *args: object) -> None:
    self.process.kill()
    if not self.process.stdout.closed:
      self.wait()

  def _read(self, ours: int) -> None:
    while True:
      try:
        part = os.read(ours, 2**16)
      except OSError:  # so Linux says that nobody writes any more
        part = b""
      if not part:
        break
      self.err += part.decode("utf-8", "replace").replace("\r\n", "\n")
    os.close(ours)

  def wait(self) -> int:
    """Waits for its end; returns its exit status."""
    self.out, _ = self.process.communicate(timeout=600)
    self._reader.join()
    return self.process.returncode

  @property
  def screen(self) -> list[str]:
    """What is to be seen of stderr now."""
    return screen(self.err)

"""Runs as processes of their own: killed, signalled, on full disks.

Importing everything takes longer than what is tested. So most are forked from a
server that has done it once.
"""

import atexit
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import quick

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Starting takes some seconds, and many where others use the machine.
PATIENCE_SECONDS = 900

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["memory_vit.train.run", "ml_collections"])


def main_of(module: str) -> str:
  """The code of `python -m module`."""
  return (
    "import runpy\n"
    f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
  )


MAIN = main_of("memory_vit.main")


class Run:
  """The command that trains, on the digits and a tiny backbone."""

  def __init__(self, backbone: pathlib.Path, workdir: pathlib.Path, **options):
    self.workdir = workdir
    options = {
      "backbone": backbone, "upstream.name": "",
      "batch_size": 16, "batch_size_eval": 64, "total_steps": 60,
      "eval_every": 30, "checkpoint_every": 10, "log_every": 1,
      "log_images": 0, **options,
    }  # fmt: skip
    self._flags = ["--config=configs/digits.py", f"--workdir={workdir}"]
    self._flags += [f"--config.{key}={v}" for key, v in options.items()]
    self._logs = (pathlib.Path(f"{workdir}-{i}.log") for i in itertools.count())

  def start(
    self, patch: str = "", fresh: bool = False, flags: Sequence[str] = ()
  ) -> "Process":
    """Starts it, after some code; `fresh` as a shell would."""
    flags = [*self._flags, *flags]
    return Process(patch + MAIN, flags, next(self._logs), fresh)

  def finish(self, *flags: str) -> "Process":
    """Runs it to its end."""
    process = self.start(flags=flags)
    assert process.wait() == 0, process.text
    return process

  def state(self) -> dict:
    """What lies in the newest state: digests of all arrays, and the rest."""
    path = max((self.workdir / "checkpoints").glob("[0-9]*"))
    saved = json.loads((path / "state.json").read_text())["saved"]
    del saved["files"], saved["meta"]["timed"]  # of the clock
    return saved

  def steps(self) -> list[int]:
    """The steps that are saved."""
    paths = (self.workdir / "checkpoints").glob("[0-9]*")
    return sorted(int(path.name) for path in paths)


class Process:
  """A process that writes its stderr to a file, and its stdout beside it."""

  def __init__(
    self,
    code: str,
    flags: Sequence[str],
    log: pathlib.Path,
    fresh: bool = False,
    devices: int = 1,
  ) -> None:
    """Starts it.

    Args:
      code: what it runs.
      flags: its command line.
      log: for its stderr.
      fresh: whether it imports everything itself, as a shell would start it.
      devices: how many it has.
    """
    self._log, self._printed = log, pathlib.Path(f"{log}.stdout")
    xla = f"--xla_force_host_platform_device_count={devices} {quick.XLA_FLAGS}"
    log.touch()
    if fresh:
      with log.open("w") as stderr, self._printed.open("w") as stdout:
        self._process = subprocess.Popen(
          [sys.executable, "-c", code, *flags], cwd=ROOT,
          env={**os.environ, "XLA_FLAGS": xla}, stdout=stdout, stderr=stderr,
        )  # fmt: skip
      self._status = self._process.poll
    else:
      arguments = (code, flags, str(log), str(self._printed), xla)
      self._process = _SERVER.Process(target=_run, args=arguments)
      self._process.start()
      self._status = lambda: self._process.exitcode
    self.pid = self._process.pid

  def __enter__(self) -> "Process":
    return self

  def __exit__(self, *args: object) -> None:
    if self._status() is None:
      self.signal(signal.SIGKILL)
      self.wait()

  @property
  def status(self) -> int | None:
    """Its exit status, once it has ended."""
    return self._status()

  @property
  def text(self) -> str:
    """What it has said by now."""
    return self._log.read_text(encoding="utf-8")

  @property
  def printed(self) -> str:
    """Its stdout by now."""
    return self._printed.read_text(encoding="utf-8")

  def wait_for(self, pattern: str) -> None:
    """Waits until it says something."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not re.search(pattern, self.text):
      assert self._status() is None, f"it ended:\n{self.text}"
      assert time.monotonic() < end, f"{pattern!r} did not come:\n{self.text}"
      time.sleep(0.01)

  def signal(self, number: int) -> None:
    """Sends it a signal."""
    os.kill(self.pid, number)

  def wait(self, storm: int | None = None) -> int:
    """Waits for its end, and sends it a signal all the time where one is given.

    Returns:
      Its exit status.
    """
    began = time.monotonic()
    while self._status() is None:
      assert time.monotonic() < began + PATIENCE_SECONDS, self.text
      if storm is not None:
        self.signal(storm)
      time.sleep(0.01)
    self.seconds = time.monotonic() - began
    return self._status()

  @property
  def last_step(self) -> int:
    """The last step that it has shown."""
    return int(re.findall(r" step (\d+)/", self.text)[-1])

  @property
  def resumed(self) -> int:
    """The step from which it went on; 0 where it began."""
    found = re.search(r"resuming from step (\d+) in", self.text)
    return int(found[1]) if found else 0


def _run(
  code: str, flags: Sequence[str], log: str, printed: str, xla: str
) -> None:
  """What a forked process does."""
  os.environ["XLA_FLAGS"] = xla
  os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
  os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
  os.chdir(ROOT)
  sys.path.insert(0, str(ROOT))
  sys.argv = ["memory_vit.main", *flags]
  try:
    exec(code, {"__name__": "test"})
  finally:
    # Such a process ends without: what is said last must not be lost.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()

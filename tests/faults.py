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

MAIN = """
import runpy
runpy.run_module("memory_vit.main", run_name="__main__", alter_sys=True)
"""


class Run:
  """The command that trains, on the digits and a tiny backbone."""

  def __init__(self, backbone: pathlib.Path, workdir: pathlib.Path, **options):
    self.workdir = workdir
    options = {
      "pretrain.variant": "", "backbone": backbone, "upstream.name": "",
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
  """A process that writes what it says to a file."""

  def __init__(
    self, code: str, flags: list[str], log: pathlib.Path, fresh: bool = False
  ) -> None:
    """Starts it.

    Args:
      code: what it runs.
      flags: its command line.
      log: for its stderr.
      fresh: whether it imports everything itself.
    """
    self._log = log
    log.touch()
    if fresh:
      environment = {**os.environ, "XLA_FLAGS": quick.XLA_FLAGS}
      with log.open("w") as file:
        self._process = subprocess.Popen(
          [sys.executable, "-c", code, *flags], cwd=ROOT, env=environment,
          stdout=subprocess.DEVNULL, stderr=file,
        )  # fmt: skip
      self._status = self._process.poll
    else:
      arguments = (code, flags, str(log))
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
  def text(self) -> str:
    """What it has said by now."""
    return self._log.read_text(encoding="utf-8")

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


def _run(code: str, flags: list[str], log: str) -> None:
  """What a forked process does."""
  os.environ["XLA_FLAGS"] = quick.XLA_FLAGS
  os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  os.chdir(ROOT)
  sys.path.insert(0, str(ROOT))
  sys.argv = ["memory_vit.main", *flags]
  try:
    exec(code, {"__name__": "test"})
  finally:
    # Such a process ends without: what is said last must not be lost.
    atexit._run_exitfuncs()
    sys.stderr.flush()

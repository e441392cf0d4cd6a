"""Runs as processes of their own: killed, signalled, on full disks."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

from conftest import ROOT

# A start takes some seconds, and many where other processes use the machine.
PATIENCE_SECONDS = 600

# Runs the command after some code of the test's.
_PATCHED = """
import runpy, sys
{patch}
sys.argv[0] = "memory_vit.main"
runpy.run_module("memory_vit.main", run_name="__main__", alter_sys=True)
"""


class Run:
  """The command that trains, on the digits and a tiny backbone."""

  def __init__(self, backbone: pathlib.Path, workdir: pathlib.Path, **options):
    self.workdir = workdir
    options = {
      "pretrain.variant": "", "backbone": backbone, "upstream.name": "",
      "batch_size": 16, "batch_size_eval": 64, "total_steps": 60,
      "eval_every": 30, "checkpoint_every": 10, "log_every": 1, **options,
    }  # fmt: skip
    self._flags = ["--config=configs/quickstart.py", f"--workdir={workdir}"]
    self._flags += [f"--config.{key}={v}" for key, v in options.items()]

  def start(self, patch: str = "", *flags: str) -> "Process":
    """Starts it, after some code."""
    code = _PATCHED.format(patch=patch)
    return Process([sys.executable, "-c", code, *self._flags, *flags])

  def finish(self) -> "Process":
    """Runs it to its end."""
    process = self.start()
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
  """A process whose stderr is read as it comes."""

  def __init__(self, command: list[str]) -> None:
    # Tests share what they have compiled, see conftest.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    self._process = subprocess.Popen(
      command, cwd=ROOT, env=environment, text=True,
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    self.pid = self._process.pid
    self.text = ""

  def __enter__(self) -> "Process":
    return self

  def __exit__(self, *args: object) -> None:
    self._process.kill()
    self.wait()

  def wait_for(self, pattern: str) -> re.Match:
    """Reads up to a line in which a pattern is found."""
    for line in self._process.stderr:
      self.text += line
      if match := re.search(pattern, line):
        return match
    raise AssertionError(f"{pattern!r} did not come:\n{self.text}")

  def signal(self, number: int) -> None:
    """Sends it a signal."""
    self._process.send_signal(number)

  def wait(self) -> int:
    """Reads to the end; returns the exit status."""
    began = time.monotonic()
    self.text += self._process.stderr.read()
    self.seconds = time.monotonic() - began
    status = self._process.wait(PATIENCE_SECONDS)
    self._process.stderr.close()
    return status

  @property
  def last_step(self) -> int:
    """The last step that it has shown."""
    return int(re.findall(r" step (\d+)/", self.text)[-1])

  @property
  def resumed(self) -> int:
    """The step from which it went on."""
    return int(re.search(r"going on from step (\d+) in", self.text)[1])

"""Processes of a Ray cluster that a test started."""

import os
import signal
import subprocess

# Ray's own time to start is short for a machine that does something else.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "RAY_USAGE_STATS_ENABLED": "0",
  "RAY_raylet_start_wait_time_s": "300",
}


def environment():
  """Of a command that starts a cluster."""
  return {**os.environ, **ENVIRONMENT}


def children_of(process, word):
  """Process ids below a command, by what they call themselves."""
  listed = subprocess.run(
    ["ps", "-eo", "pid,sid,ppid,args"],
    check=True, capture_output=True, text=True,
  ).stdout.splitlines()[1:]  # fmt: skip
  rows = [line.split(None, 3) for line in listed]
  below, size = {process.pid}, 0
  while len(below) > size:
    size = len(below)
    below |= {int(pid) for pid, _, parent, _ in rows if int(parent) in below}
  return [
    int(pid) for pid, _, _, args in rows if int(pid) in below and word in args
  ]


def end(process, seconds):
  """Kill a command and all that it started."""
  if process.poll() is None:
    for pid in children_of(process, ""):
      try:
        os.kill(pid, signal.SIGKILL)
      except ProcessLookupError:
        continue
  process.wait(seconds)

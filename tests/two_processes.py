"""Real processes on this machine that train together; and what they saw.

As a program it is `python -m memory_vit.main` which also writes, to the file
named by LOG, one JSON line for each training batch (digests of its rows), each
step (losses) and each batch of an evaluation (rows that count).
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import quick

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In tests a dead process shall be noticed soon.
HEARTBEAT = 10
# Seconds until a group of processes must have ended; far more than it takes.
PATIENCE = float(os.environ.get("MEMORY_VIT_PATIENCE", 1800))


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a process ended."""

  status: int
  stdout: str
  stderr: str


@contextlib.contextmanager
def kept_port(shared: bool = True) -> Iterator[int]:
  """A port that nobody else gets meanwhile, and at which nobody listens.

  Args:
    shared: whether a coordinator of ours may listen there: that of jax, like
      all of gRPC, shares a port with whoever wants it (SO_REUSEPORT).
  """
  with socket.socket() as one:
    if shared:
      one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(("127.0.0.1", 0))
    yield one.getsockname()[1]


def environment(devices: int, **more: str) -> dict[str, str]:
  """For a child with so many devices of its own."""
  flags = f"--xla_force_host_platform_device_count={devices} {quick.XLA_FLAGS}"
  return {
    **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
    "PYTHONPATH": str(ROOT), **more,
  }  # fmt: skip


def joined(process: int, port: int, count: int = 2) -> list[str]:
  """The flags of one of several processes."""
  return [
    f"--coordinator=127.0.0.1:{port}",
    f"--num_processes={count}",
    f"--process_id={process}",
    f"--heartbeat_timeout={HEARTBEAT}",
    "--initialization_timeout=900",
  ]


def command(log: pathlib.Path, flags: Sequence[str]) -> dict:
  """Arguments of `subprocess.Popen` for a run that is logged."""
  return {
    "args": [sys.executable, __file__, *flags],
    "cwd": ROOT, "text": True,
    "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
    "env": environment(2, LOG=str(log)),
  }  # fmt: skip


@contextlib.contextmanager
def started(commands: Sequence[Mapping]) -> Iterator[list[subprocess.Popen]]:
  """Starts processes; none outlives the block."""
  with contextlib.ExitStack() as stack:  # waits, and closes all pipes
    processes = [
      stack.enter_context(subprocess.Popen(**one)) for one in commands
    ]
    try:
      yield processes
    finally:
      for process in processes:
        if process.poll() is None:
          process.kill()


def ends(processes: Sequence[subprocess.Popen]) -> list[Ended]:
  """Waits for processes that shall end by themselves."""
  done = []
  for process in processes:
    out, err = process.communicate(timeout=PATIENCE)
    done.append(Ended(process.returncode, out, err))
  return done


def run_two(
  logs: Sequence[pathlib.Path], flags: Sequence[Sequence[str]]
) -> list[Ended]:
  """Runs two processes of two devices each; `flags` of each."""
  with kept_port() as port:
    commands = [
      command(logs[i], [*flags[i], *joined(i, port)]) for i in range(2)
    ]
    with started(commands) as processes:
      return ends(processes)


def read(log: pathlib.Path, kind: str) -> list:
  """What a process saw, of one kind."""
  lines = [json.loads(line) for line in log.read_text().splitlines()]
  return [line[kind] for line in lines if kind in line]


def _log_what_is_seen() -> None:
  """Wraps the two places through which all that is trained passes."""
  import jax
  import numpy as np

  from memory_vit.runtime import sharding
  from memory_vit.train import step

  def note(**line) -> None:
    with open(os.environ["LOG"], "a", encoding="ascii") as log:
      log.write(json.dumps(line) + "\n")

  shard_batch, take_step = sharding.shard_batch, step.Step.__call__

  def logged_batch(batch, mesh):
    if not isinstance(batch, Mapping):  # images of which pictures are made
      return shard_batch(batch, mesh)
    if "mask" in batch:
      note(counted=int(batch["mask"].sum()))
    else:
      rows = [
        hashlib.sha256(np.ascontiguousarray(image)).hexdigest()[:16]
        for image in batch["image"]
      ]
      note(examples=rows)
    return shard_batch(batch, mesh)

  def logged_step(self, state, frozen, batch):
    state, metrics = take_step(self, state, frozen, batch)
    values = jax.device_get(metrics)
    losses = {name: float(v["loss"]) for name, v in values.items()}
    note(losses=losses)
    return state, metrics

  sharding.shard_batch, step.Step.__call__ = logged_batch, logged_step


if __name__ == "__main__":
  _log_what_is_seen()
  runpy.run_module("memory_vit.main", run_name="__main__")

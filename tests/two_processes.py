"""Real processes on this machine that train together; and what they saw.

Each writes, to a file of its own, one JSON line for each training batch
(digests of its rows), each step (losses) and each batch of an evaluation (rows
that count).
"""

import contextlib
import hashlib
import json
import pathlib
import socket
from collections.abc import Iterator, Mapping, Sequence

from faults import MAIN, Process

# In tests a dead process shall be noticed soon.
HEARTBEAT = 10


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


def joined(process: int, port: int, count: int = 2) -> list[str]:
  """The flags of one of several processes."""
  return [
    f"--coordinator=127.0.0.1:{port}",
    f"--num_processes={count}",
    f"--process_id={process}",
    f"--heartbeat_timeout={HEARTBEAT}",
    "--initialization_timeout=900",
  ]


def start(log: pathlib.Path, flags: Sequence[str], devices: int = 2) -> Process:
  """Starts a run that writes to `log` what it saw."""
  watch = f"import two_processes\ntwo_processes.watch({str(log)!r})\n"
  return Process(
    watch + MAIN, flags, log.with_suffix(".stderr"), devices=devices
  )


def run_two(
  logs: Sequence[pathlib.Path], flags: Sequence[Sequence[str]]
) -> list[Process]:
  """Runs two processes of two devices each to their end; `flags` of each."""
  with kept_port() as port, contextlib.ExitStack() as stack:
    both = [
      stack.enter_context(start(logs[i], [*flags[i], *joined(i, port)]))
      for i in range(2)
    ]
    for process in both:
      process.wait()
  return both


def read(log: pathlib.Path, kind: str) -> list:
  """What a process saw, of one kind."""
  lines = [json.loads(line) for line in log.read_text().splitlines()]
  return [line[kind] for line in lines if kind in line]


def watch(log: str) -> None:
  """Wraps the two places through which all that is trained passes."""
  import jax
  import numpy as np

  from memory_vit.runtime import sharding
  from memory_vit.train import step

  def note(**line) -> None:
    with open(log, "a", encoding="ascii") as file:
      file.write(json.dumps(line) + "\n")

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

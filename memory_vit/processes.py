"""Several processes that run as one: how they start, agree, and end.

Each calls the same things in the same order, as jax wants it. A run of one
process starts nothing, and everything here then does next to nothing.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memory_vit.errors import ConfigError, MemoryVitError

logger = logging.getLogger("memory_vit")

# After a save that was asked for from outside, all processes leave together.
PREEMPTED = 75
# What jax says where another process is gone, whatever carries the messages.
_LOST = ("gloo", "nccl", "connection reset", "connection closed",
         "socket closed", "broken pipe", "coordination service", "heartbeat",
         "barrier")  # fmt: skip
# How long the process that the others need to hear of anything waits for them
# to say what they have to, before it leaves with an error; in seconds.
_GRACE = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How a process finds the others.

  Attributes:
    coordinator: "HOST:PORT" of process 0; "" where it is detected.
    num_processes: of all hosts; None where it is detected.
    process_id: of this one, from 0; None where it is detected.
    distributed: whether jax may detect what is not given: on Cloud TPU, under
      SLURM, Open MPI and on Kubernetes.
    initialization_timeout: seconds until all must be there.
    heartbeat_timeout: seconds after which a process that gives no sign of life
      is taken for dead, and the others end.
  """

  coordinator: str = ""
  num_processes: int | None = None
  process_id: int | None = None
  distributed: bool = False
  initialization_timeout: int = 300
  heartbeat_timeout: int = 100


def define_flags() -> Callable[[], Options]:
  """Declares the flags of `Options`; returns what reads them afterwards."""
  from absl import flags  # Only commands have flags.

  flags.disclaim_key_flags()  # --help of the command shows them
  default = Options()
  flags.DEFINE_string(
    "coordinator", default.coordinator,
    "HOST:PORT of process 0, for a run of several processes.",
  )  # fmt: skip
  flags.DEFINE_integer(
    "num_processes", None, "How many processes run together.", lower_bound=1
  )
  flags.DEFINE_integer(
    "process_id", None, "Which of them this one is, from 0.", lower_bound=0
  )
  flags.DEFINE_bool(
    "distributed", default.distributed,
    "Let jax find the other processes: on Cloud TPU, under SLURM, Open MPI and "
    "on Kubernetes.",
  )  # fmt: skip
  for name, what in {
    "initialization_timeout": "Seconds until all processes must be there.",
    "heartbeat_timeout": "Seconds without a sign of life after which a process "
    "is taken for dead, and the others end.",
  }.items():
    flags.DEFINE_integer(name, getattr(default, name), what, lower_bound=1)
  names = [field.name for field in dataclasses.fields(Options)]
  return lambda: Options(**{name: flags.FLAGS[name].value for name in names})


def start(options: Options) -> None:
  """Joins the other processes; does nothing where none are asked for.

  Before anything of jax is used.

  Raises:
    ConfigError: for options that do not go together; where the others cannot
      be found.
  """
  given = {
    "--coordinator": options.coordinator or None,
    "--num_processes": options.num_processes,
    "--process_id": options.process_id,
  }
  missing = [name for name, value in given.items() if value is None]
  if not options.distributed:
    if len(missing) == len(given):
      return
    if missing:
      raise ConfigError(
        f"{', '.join(missing)} is missing: expected all of {', '.join(given)}, "
        "or --distributed where jax can detect them."
      )
  if options.coordinator:
    _require_address(options.coordinator)
    # Where it does not answer, jax would end the process without our words.
    if options.process_id:
      _wait_for(options.coordinator, options.initialization_timeout)
  logger.info(
    "process %s of %s: waiting up to %d s for the others at %s",
    *("?" if v is None else v for v in (options.process_id,
                                        options.num_processes)),
    options.initialization_timeout,
    options.coordinator or "the address that jax detects",
  )  # fmt: skip
  try:
    jax.distributed.initialize(
      coordinator_address=options.coordinator or None,
      num_processes=options.num_processes,
      process_id=options.process_id,
      initialization_timeout=options.initialization_timeout,
      heartbeat_timeout_seconds=options.heartbeat_timeout,
    )
  except (RuntimeError, TypeError, ValueError) as error:
    raise ConfigError(
      f"the processes cannot be joined: {_line(error)} Expected --coordinator, "
      "--num_processes and --process_id, or a place where jax detects them "
      "(--distributed)."
    ) from error
  logger.info(
    "process %d of %d; should one end, the others end within %d s (by jax, "
    "with status 134, where they wait for nothing): start all of them again",
    jax.process_index(), jax.process_count(), options.heartbeat_timeout,
  )  # fmt: skip


def _require_address(address: str) -> None:
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ConfigError(f"--coordinator is {address!r}, expected HOST:PORT.")


def _wait_for(address: str, timeout: float) -> None:
  """Returns once somebody listens at "HOST:PORT"."""
  host, _, port = address.rpartition(":")
  end = time.monotonic() + timeout
  while True:
    try:
      left = max(0.1, end - time.monotonic())
      with socket.create_connection((host.strip("[]"), int(port)), left):
        return
    except OSError as error:
      if time.monotonic() >= end:
        raise ConfigError(
          f"no coordinator at {address} for {timeout:g} s ({error}). Expected "
          "process 0 of this run there: see that it runs, that the address is "
          "right, and that this host can reach it (--coordinator, "
          "--initialization_timeout)."
        ) from error
      time.sleep(0.2)


def require_same(what: str, values: Mapping[str, Any]) -> None:
  """Raises unless all processes have the same values.

  Args:
    what: to call them in the message.
    values: that JSON can hold.

  Raises:
    ConfigError: on every process, with the keys that differ and their values;
      where processes run beside each other that know nothing of each other.
  """
  if jax.process_count() == 1:
    return
  _require_joined()
  text = json.dumps(values, sort_keys=True)
  digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
  digests = multihost_utils.process_allgather(digest)
  if (digests == digests[0]).all():
    return
  found = [json.loads(other) for other in _gather(text)]
  lines = []
  for key in sorted({key for values in found for key in values}):
    each = [json.dumps(values.get(key)) for values in found]
    if len({*each}) > 1:
      shown = [f"process {i} has {_short(v)}" for i, v in enumerate(each)]
      lines.append(f"{key}: {', '.join(shown)}")
  raise ConfigError(
    f"the processes differ in their {what}: start all of them with the same.\n"
    "  " + "\n  ".join(lines)
  )


def _require_joined() -> None:
  """Devices of other hosts may be there although nobody has joined them."""
  if not jax.distributed.is_initialized():
    raise ConfigError(
      f"this is one of {jax.process_count()} processes that were not joined: "
      "expected --distributed, on every host."
    )
  local, all_of_them = jax.local_device_count(), len(jax.devices())
  if local * jax.process_count() != all_of_them:
    raise ConfigError(
      f"process {jax.process_index()} has {local} of {all_of_them} devices: "
      f"expected as many on each of the {jax.process_count()} processes."
    )


def _short(text: str) -> str:
  return text if len(text) <= 200 else f"{text[:200]}..."


def _gather(text: str) -> list[str]:
  """The texts of all processes, on all."""
  encoded = np.frombuffer(text.encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(encoded.size))
  padded = np.zeros(lengths.max(), np.uint8)
  padded[: encoded.size] = encoded
  rows = multihost_utils.process_allgather(padded)
  return [
    row[:length].tobytes().decode()
    for row, length in zip(rows, lengths, strict=True)
  ]


def from_first(value: Any) -> Any:
  """The value of process 0, which JSON can hold, on all processes."""
  if jax.process_count() == 1:
    return value
  return json.loads(_gather(json.dumps(value))[0])


def on_first(what: str, action: Callable[[], None]) -> None:
  """Has process 0 do something, while the others wait until it is done.

  Args:
    what: a name, the same on all.
    action: what to do. Where it raises, the others end with a broken run.
  """
  if jax.process_index() == 0:
    action()
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def first_before_others(what: str, action: Callable[[], Any]) -> Any:
  """Each process does the same; process 0 is done before the others begin.

  For what makes files where there are none yet.
  """
  results = []
  on_first(what, lambda: results.append(action()))
  return results[0] if results else action()


def require_shared(directory: Path) -> None:
  """Raises unless all processes see the same directory.

  Raises:
    ConfigError: on every process, with the numbers of those that do not.
  """
  if jax.process_count() == 1:
    return
  file = directory / f".seen-by-all-{from_first(secrets.token_hex(8))}"
  on_first("write what all should see", file.touch)
  end = time.monotonic() + 5
  while not file.exists() and time.monotonic() < end:
    time.sleep(0.2)  # of some network file systems
  seen = [json.loads(text) for text in _gather(json.dumps(file.exists()))]
  on_first("remove what all should see", file.unlink)
  blind = [i for i, sees in enumerate(seen) if not sees]
  if blind:
    raise ConfigError(
      f"--workdir {directory}: processes {blind} do not see what process 0 "
      "writes there. Expected one directory on a file system that all hosts "
      "share."
    )


@contextlib.contextmanager
def leaving() -> Iterator[None]:
  """Around a command: ends a process so that the others notice.

  With one process it does nothing. With several, one that ended in the usual
  way after an error would first wait for the others, which wait for it.
  """
  try:
    yield
  except BaseException as error:
    together = isinstance(error, SystemExit) and error.code in (
      None, 0, PREEMPTED,
    )  # fmt: skip
    if together or not jax.distributed.is_initialized():
      raise
    _leave(error)


def _leave(error: BaseException) -> None:
  """Says why, and ends at once."""
  status = 1
  if isinstance(error, SystemExit) and isinstance(error.code, int):
    status = error.code
  elif isinstance(error, MemoryVitError):
    print(f"error: {error}", file=sys.stderr)
    status = 2
  elif is_lost_partner(error):
    print(
      f"error: process {jax.process_index()} of {jax.process_count()} lost "
      f"another one ({_line(error)}). Look for the error of that one. Start "
      "all of them again: the run goes on from what was saved last.",
      file=sys.stderr,
    )
  else:
    traceback.print_exception(error)
  sys.stdout.flush()
  sys.stderr.flush()
  if jax.process_index() == 0:
    time.sleep(_GRACE)
  os._exit(status)


def is_lost_partner(error: BaseException) -> bool:
  """Whether jax fails because another process is gone."""
  if not isinstance(error, RuntimeError | ValueError) or isinstance(
    error, MemoryVitError
  ):
    return False
  text = str(error).lower()
  return any(sign in text for sign in _LOST)


def _line(error: BaseException) -> str:
  """The first line of what an error says."""
  return next(iter(str(error).splitlines()), type(error).__name__)[:300]

"""How the processes of a run find each other, and how they end.

A run of one process starts nothing, and everything here then does next to
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from absl import flags
from etils import epy

from memory_vit.errors import ConfigError

with epy.lazy_imports():  # the flags are parsed without them
  import jax

  from memory_vit.runtime import preemption, processes

logger = logging.getLogger(__name__)

# How long the process that the others need to hear of anything waits for them
# to say what they have to, before it leaves with an error; in seconds.
_GRACE = 3.0
# Seconds that one may ask to wait, a day: jax takes 32 bits.
_LONGEST = 86_400
# Processes of one run.
_MOST = 2**20


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


def define_flags(values: flags.FlagValues) -> Callable[[], Options]:
  """Declare the flags of `Options`; return what reads them afterwards."""
  default = Options()
  flags.DEFINE_string(
    "coordinator", default.coordinator,
    "HOST:PORT of process 0, for a run of several processes.",
    flag_values=values,
  )  # fmt: skip
  flags.DEFINE_integer(
    "num_processes", None, "How many processes run together.",
    lower_bound=1, upper_bound=_MOST, flag_values=values,
  )  # fmt: skip
  flags.DEFINE_integer(
    "process_id", None, "Which of them this one is, from 0.",
    lower_bound=0, upper_bound=_MOST - 1, flag_values=values,
  )  # fmt: skip
  flags.DEFINE_bool(
    "distributed", default.distributed,
    "Let jax find the other processes: on Cloud TPU, under SLURM, Open MPI and "
    "on Kubernetes.",
    flag_values=values,
  )  # fmt: skip
  for name, what in {
    "initialization_timeout": "Seconds until all processes must be there.",
    "heartbeat_timeout": "Seconds without a sign of life after which a process "
    "is taken for dead, and the others end.",
  }.items():
    flags.DEFINE_integer(
      name, getattr(default, name), what,
      lower_bound=1, upper_bound=_LONGEST, flag_values=values,
    )  # fmt: skip
  names = [field.name for field in dataclasses.fields(Options)]
  return lambda: Options(**{name: values[name].value for name in names})


def start(options: Options) -> None:
  """Join the other processes; do nothing where none are asked for.

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
  """Return once somebody listens at "HOST:PORT"."""
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


@contextlib.contextmanager
def leaving() -> Iterator[None]:
  """Around a command: ends a process at once that failed or was told to stop.

  In the usual way it would first wait: of several processes for the others,
  which wait for it; and for threads of orbax, which wait forever once a write
  has failed. Whoever asked it to stop does not wait for long.
  """
  try:
    yield
  except BaseException as error:
    # Where processes are joined they leave together, once their state is saved;
    # alone one leaves as every program does: nothing waits for it.
    usual = (None, 0)
    if jax.distributed.is_initialized():
      usual = (*usual, preemption.PREEMPTED, preemption.STOPPED)
    if isinstance(error, SystemExit) and error.code in usual:
      raise
    _leave(error)


def _leave(error: BaseException) -> None:
  """Say why, and end at once."""
  status = 1
  if isinstance(error, SystemExit) and isinstance(error.code, int):
    status = error.code
  elif processes.is_lost_partner(error):
    traceback.print_exception(error)
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
  if jax.distributed.is_initialized() and jax.process_index() == 0:
    time.sleep(_GRACE)
  os._exit(status)


def _line(error: BaseException) -> str:
  """The first line of what an error says."""
  return next(iter(str(error).splitlines()), type(error).__name__)[:300]

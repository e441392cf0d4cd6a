"""Join the processes of a distributed run, and end them."""

import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator

from etils import epy

from memory_vit.errors import ConfigError
from memory_vit.runtime import options as options_lib
from memory_vit.runtime.messages import first_line
from memory_vit.runtime.options import Number, Switch, option

with epy.lazy_imports():  # parsing flags does not need these modules
  import jax

  from memory_vit.runtime import preemption, processes

logger = logging.getLogger(__name__)

# Seconds that process 0 waits before it exits with an error. It relays all
# messages between processes, and the last messages must still get through.
_GRACE = 3.0
_SECONDS = Number(1, 86_400, "seconds, up to a day")
_MOST = 2**20


@dataclasses.dataclass(frozen=True)
class _Address:
  expected: str = "HOST:PORT"

  def accepts(self, value: str) -> bool:
    host, _, port = value.rpartition(":")
    is_port = port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
    return not value or (bool(host) and is_port)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Options for joining the other processes of a run.

  If `distributed` is true, JAX detects options that are None or "".

  Raises:
    ConfigError: for a value that its rule refuses.
  """

  coordinator: str = option(
    "",
    _Address(),
    "HOST:PORT of process 0, for a run of several processes.",
  )
  distributed: bool = option(
    False,
    Switch(),
    "Let jax detect the other processes: on Cloud TPU, under SLURM, Open MPI "
    "and on Kubernetes.",
  )
  num_processes: int | None = option(
    None, Number(1, _MOST, "processes"), "Number of processes."
  )
  process_id: int | None = option(
    None,
    Number(0, _MOST - 1, "the first process is 0"),
    "Number of this process, from 0.",
  )
  initialization_timeout: int = option(
    300, _SECONDS, "Seconds until all processes must have joined."
  )
  heartbeat_timeout: int = option(
    100,
    _SECONDS,
    "Seconds without a sign of life until a process counts as dead, and the "
    "others end.",
  )

  def __post_init__(self) -> None:
    options_lib.require(self, "--")


def start(options: Options) -> None:
  """Join the other processes if `options` ask for it, before JAX is used.

  Raises:
    ConfigError: if an option is missing, or the processes cannot be joined.
  """
  flags = {
    "--coordinator": options.coordinator or None,
    "--num_processes": options.num_processes,
    "--process_id": options.process_id,
  }
  missing = [name for name, value in flags.items() if value is None]
  if not options.distributed:
    if len(missing) == len(flags):
      return
    if missing:
      raise ConfigError(
        f"{', '.join(missing)} is missing: expected all of {', '.join(flags)}, "
        "or --distributed if jax can detect the processes."
      )
  # Check that the coordinator answers: if it does not, jax ends this process
  # without our message.
  if options.coordinator and options.process_id:
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
      f"the processes cannot be joined: {first_line(error)} Expected "
      "--coordinator, --num_processes and --process_id, or --distributed if "
      "jax can detect the processes."
    ) from error
  logger.info(
    "joined as process %d of %d. If a process ends, all others end within %d s "
    "(jax may end them with status 134): then start all processes again",
    jax.process_index(), jax.process_count(), options.heartbeat_timeout,
  )  # fmt: skip


def _wait_for(address: str, timeout: float) -> None:
  """Wait until a process listens at "HOST:PORT"."""
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
          f"no coordinator answered at {address} for {timeout:g} s ({error}). "
          "Check that process 0 of this run has started, that --coordinator is "
          "its address, and that this host can reach it, or raise "
          "--initialization_timeout."
        ) from error
      time.sleep(0.2)


@contextlib.contextmanager
def leaving() -> Iterator[None]:
  """End this process at once if its command failed or was told to stop.

  A normal exit could hang: it waits for all other processes, and for threads of
  orbax, which never end once a write has failed.
  """
  try:
    yield
  except BaseException as error:
    # Statuses after which this process may exit normally. A normal exit waits
    # for the other processes. After a request to stop, joined processes save
    # the state and stop together, with `PREEMPTED` or `STOPPED`, so none hangs.
    usual: tuple[int | None, ...] = (None, 0)
    if jax.distributed.is_initialized():
      usual = (*usual, preemption.PREEMPTED, preemption.STOPPED)
    if isinstance(error, SystemExit) and error.code in usual:
      raise
    _leave(error)


def _leave(error: BaseException) -> None:
  status = 1
  if isinstance(error, SystemExit) and isinstance(error.code, int):
    status = error.code
  else:
    traceback.print_exception(error)
  if processes.is_lost_partner(error):
    print(
      f"error: process {jax.process_index()} of {jax.process_count()} lost "
      f"another process ({first_line(error)}). Look for its error. Start "
      "all processes again: the run resumes from the last saved state.",
      file=sys.stderr,
    )
  sys.stdout.flush()
  sys.stderr.flush()
  if jax.distributed.is_initialized() and jax.process_index() == 0:
    time.sleep(_GRACE)
  os._exit(status)

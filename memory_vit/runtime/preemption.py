"""Preemption: SIGTERM or Ctrl-C stops a run, which can be resumed."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

# Exit status of a preempted run with a saved state: EX_TEMPFAIL of sysexits.h,
# start it again.
PREEMPTED = 75
# The status of any command after Ctrl-C; the state is saved as well.
STOPPED = 130

# `timeout` and some schedulers repeat SIGTERM: one within this time of another
# is not a second request.
_AT_ONCE_SECONDS = 1.0


class Interrupted(KeyboardInterrupt):
  """A run was asked to stop, and has saved its state; `status` is for its exit.

  Not an `Exception`: only a command's outermost level should catch it.
  """

  def __init__(self, status: int, message: str) -> None:
    super().__init__(message)
    self.status = status


class StopSignal:
  """A request to stop, by SIGTERM or Ctrl-C.

  A loop that saves its state asks after every step. Everywhere else a signal
  raises `Interrupted` at once: nothing is lost that is not made again.

  Several processes have to stop at the same step: the signal goes to jax, which
  tells all of them and chooses the step. `jax.distributed` has to be
  initialized before `listening`, and all processes have to ask after every step
  and in every batch of an evaluation; a signal waits until they do.
  """

  def __init__(self) -> None:
    self._signal: int | None = None
    self._since = 0.0
    self._asks = False
    self._asked = 0

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Take SIGTERM and Ctrl-C, in the main thread of a command.

    The former handlers come back, except after `Interrupted`: then the exit
    status says that the state is saved, and no further SIGTERM may change it
    while the process ends; a further Ctrl-C ends it at once.
    """
    signals = [signal.SIGINT]
    # jax has a SIGTERM handler of its own, which another would replace.
    if not jax.distributed.is_initialized():
      signals.append(signal.SIGTERM)
    before = {number: signal.signal(number, self._take) for number in signals}
    after = before
    try:
      yield
    except Interrupted:
      after = {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.SIG_DFL}
      raise
    finally:
      for number in before:
        signal.signal(number, after[number])

  @contextlib.contextmanager
  def asked_for(self) -> Iterator[None]:
    """Let signals wait until the loop asks by `is_wanted`."""
    self._asks = True
    try:
      yield
    finally:
      self._asks = False
    self.check()  # it came too late for the loop

  def is_wanted(self) -> bool:
    """Whether to save and stop, the same in all processes; all must call."""
    if jax.distributed.is_initialized():
      # Not the step: a second pass begins at step 1 again.
      self._asked += 1
      return multihost_utils.reached_preemption_sync_point(self._asked)
    return self._signal is not None

  def check(self) -> None:
    """Raise `Interrupted` if a stop is wanted; all processes must call."""
    if self.is_wanted():
      raise self.interrupted("the saved state is unchanged")

  def interrupted(self, what: str) -> Interrupted:
    """The exception for the signal that came; `what` happened to the run."""
    if self._signal == signal.SIGINT:
      return Interrupted(STOPPED, f"stopped by Ctrl-C: {what}.")
    return Interrupted(PREEMPTED, f"stopped by SIGTERM: {what}.")

  def _take(self, number: int, frame: Any) -> None:
    """The signal handler; a second signal ends the process at once."""
    now = time.monotonic()
    if self._signal is not None:
      since, self._since = self._since, now
      if number == signal.SIGTERM and now - since < _AT_ONCE_SECONDS:
        return
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
      return
    self._signal, self._since = number, now
    if jax.distributed.is_initialized():
      os.kill(os.getpid(), signal.SIGTERM)  # to jax, for all processes
    elif not self._asks:
      raise self.interrupted("the saved state is unchanged")

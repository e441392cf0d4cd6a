"""Preemption: SIGTERM or Ctrl-C stops a run, which can be resumed."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

# Exit status of a preempted run that has saved its state. In sysexits.h, 75 is
# EX_TEMPFAIL: the same command may be started again.
PREEMPTED = 75
# Usual exit status of commands after Ctrl-C; the run has saved its state.
STOPPED = 130

# `timeout` and some schedulers repeat SIGTERM. A repetition within this time
# does not count as a second request to stop.
_AT_ONCE_SECONDS = 1.0


class Interrupted(KeyboardInterrupt):
  """Raised by a run that stops on request; `status` is its exit status.

  It is no `Exception`, because only the outermost level should catch it.
  """

  def __init__(self, status: int, message: str) -> None:
    super().__init__(message)
    self.status = status


class StopSignal:
  """A request to stop, by SIGTERM or Ctrl-C.

  A training loop calls `is_wanted` after every step, and saves its state before
  it stops. Everywhere else a signal raises `Interrupted` at once: a resumed run
  repeats the work that is lost.

  Several processes must stop at the same step, so jax gets the signal, tells
  all processes and chooses the step. `jax.distributed` must be initialized
  before `listening`. All processes must call `is_wanted` or `check` after every
  step and in every batch of an evaluation; a signal takes effect only then.
  """

  def __init__(self) -> None:
    self._signal: int | None = None
    self._since = 0.0
    self._asks = False
    self._asked = 0

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Handle SIGTERM and Ctrl-C, in the main thread of a command.

    At the end, the former handlers are restored. After `Interrupted`, however,
    SIGTERM is ignored, because it must not change the exit status, which says
    that the state is saved. Another Ctrl-C ends the process at once.
    """
    signals = [signal.SIGINT]
    # In joined processes, our handler would replace jax's handler of SIGTERM.
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
    """Let signals wait until the loop calls `is_wanted`."""
    self._asks = True
    try:
      yield
    finally:
      self._asks = False
    self.check()  # a signal may follow the last call of `is_wanted`

  def is_wanted(self) -> bool:
    """Return whether to save and stop; all processes must take part."""
    if jax.distributed.is_initialized():
      # Count calls, not steps: in each pass, step numbers restart at 1.
      self._asked += 1
      return multihost_utils.reached_preemption_sync_point(self._asked)
    return self._signal is not None

  def check(self) -> None:
    """Raise `Interrupted` if a stop is wanted; all processes must take part."""
    if self.is_wanted():
      raise self.interrupted("the saved state is unchanged")

  def interrupted(self, what: str) -> Interrupted:
    """Return the exception for the signal; `what` says how the run ended."""
    if self._signal == signal.SIGINT:
      return Interrupted(STOPPED, f"stopped by Ctrl-C: {what}.")
    return Interrupted(PREEMPTED, f"stopped by SIGTERM: {what}.")

  def _take(self, number: int, frame: Any) -> None:
    """Handle a signal; a second request to stop ends the process at once."""
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
      # JAX's handler of SIGTERM tells all processes to stop at the same step.
      os.kill(os.getpid(), signal.SIGTERM)
    elif not self._asks:
      raise self.interrupted("the saved state is unchanged")

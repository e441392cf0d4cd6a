"""Count the programs that XLA compiles for a caller, in its own thread.

JAX reports each program to listeners of the process, from the thread that
waits for it: so each predictor counts what it caused, and not what others
compile beside it. A program that comes from a cache on disk counts as well.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(eq=False)  # two of them are never the same
class Tally:
  """How many programs were compiled so far."""

  count: int = 0


class _Running(threading.local):
  """The tallies that count in a thread."""

  def __init__(self) -> None:
    self.tallies: list[Tally] = []


# JAX's listeners are those of the process: so is this one.
_RUNNING = _Running()


def _note(event: str, duration_secs: float, **_: Any) -> None:
  if event == _EVENT:
    for tally in _RUNNING.tallies:
      tally.count += 1


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def counted() -> Iterator[Tally]:
  """Count what is compiled in this thread until the body ends."""
  tally = Tally()
  _RUNNING.tallies.append(tally)
  try:
    yield tally
  finally:
    _RUNNING.tallies.remove(tally)


class CompilationCounter:
  """A sum over all threads."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._count = 0

  @property
  def count(self) -> int:
    """Programs that were compiled inside `counting`."""
    return self._count

  @contextlib.contextmanager
  def counting(self) -> Iterator[Tally]:
    """Add what is compiled in this thread until the body ends."""
    with counted() as tally:
      try:
        yield tally
      finally:
        with self._lock:
          self._count += tally.count

"""Count the programs that XLA compiles for a caller, in its own thread.

JAX calls its listeners in the thread that waits for a program, so a predictor
counts only its own programs. Programs from a cache on disk count, too.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(eq=False)  # so that `list.remove` compares identity
class Tally:
  count: int = 0


class _Running(threading.local):
  def __init__(self) -> None:
    self.tallies: list[Tally] = []


# Each thread has its own tallies, because JAX calls `_note` in the thread that
# compiles.
_RUNNING = _Running()


def _note(event: str, duration_secs: float, **_: Any) -> None:
  if event == _EVENT:
    for tally in _RUNNING.tallies:
      tally.count += 1


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def counted() -> Iterator[Tally]:
  """Count the programs that this thread compiles until the body ends."""
  tally = Tally()
  _RUNNING.tallies.append(tally)
  try:
    yield tally
  finally:
    _RUNNING.tallies.remove(tally)


class CompilationCounter:
  """Counts the programs that all threads compile within `counting`."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._count = 0

  @property
  def count(self) -> int:
    return self._count

  @contextlib.contextmanager
  def counting(self) -> Iterator[Tally]:
    """Count like `counted`, and add the tally to `count`."""
    with counted() as tally:
      try:
        yield tally
      finally:
        with self._lock:
          self._count += tally.count

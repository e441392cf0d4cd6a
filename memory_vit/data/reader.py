"""Read a source, and note which of its examples cannot be read."""

import contextlib
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memory_vit.data import sources, watchdog
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.sources import Source
from memory_vit.errors import BrokenDataError
from memory_vit.runtime import processes

logger = logging.getLogger(__name__)

# Examples that are waited for together: what keeps the time costs a thread.
_AT_ONCE = 64
# Unreadable examples that a message lists.
_SHOWN = 20


class Reader:
  """A source, and how it is read in this process.

  Attributes:
    source: the split; its name, full_name, split, size, class_names and
      num_classes are attributes of the reader, too.
    max_bad: how many unreadable examples may be left out.
    stall_timeout: seconds without a batch after which the process is ended; 0
      is never.
  """

  def __init__(
    self, source: Source, *, max_bad: int = 0, stall_timeout: float = 0.0
  ) -> None:
    self.source = source
    self.name, self.full_name = source.name, source.full_name
    self.split, self.size = source.split, source.size
    self.class_names, self.num_classes = source.class_names, source.num_classes
    self.max_bad = max_bad
    self.stall_timeout = stall_timeout
    self._unreadable: dict[int, str] = {}
    self.mark_unreadable(source.unreadable)

  @property
  def unreadable(self) -> Mapping[int, str]:
    """Index -> why, of the unreadable examples that this process knows."""
    return types.MappingProxyType(self._unreadable)

  def mark_unreadable(self, reasons: Mapping[int, str]) -> None:
    """Leave out unreadable examples, {index: why}; each is logged once.

    Raises:
      BrokenDataError: where they are more than `max_bad`, with those before.
    """
    new = {i: why for i, why in reasons.items() if i not in self._unreadable}
    if new and len(self._unreadable) + len(new) > self.max_bad:
      together = {**self._unreadable, **new}
      lines = [self._line(i, why) for i, why in together.items()]
      named = not self.name.startswith("python:")
      raise BrokenDataError(_too_many(lines, self.max_bad, named))
    for index, why in new.items():
      line = self._line(index, why)
      logger.warning("left out (%d may be): %s", self.max_bad, line)
    self._unreadable.update(new)

  def sync_unreadable(self) -> list[int]:
    """Share the unreadable examples of all processes; all must call.

    Returns:
      Their indices, sorted.

    Raises:
      BrokenDataError: where they are more than `max_bad`.
    """
    if not self.max_bad:
      return []
    indices = processes.union_over_processes(self._unreadable)
    self.mark_unreadable(
      dict.fromkeys(indices, "another process could not read it")
    )
    return indices

  def time_limit(self, first: int) -> contextlib.AbstractContextManager[None]:
    """End the process where reading from example `first` on stalls."""
    what = f"{self.source}, from example {first} on"
    return watchdog.limit(self.stall_timeout, what)

  def each(
    self, make: Callable[[tf.Tensor], Any]
  ) -> Iterator[Any | tf.errors.OpError]:
    """Apply a function to the index of every example, in parallel, in order.

    Args:
      make: int64 () -> tensors.

    Yields:
      What it gives, as numpy arrays, or what it has raised. Where that stalls
      the process is ended, as in training.
    """
    examples = sources.attempts(tf.data.Dataset.range(self.size), make)
    for first in range(0, self.size, _AT_ONCE):
      with self.time_limit(first):
        chunk = list(itertools.islice(examples, _AT_ONCE))
      yield from chunk

  def nothing_readable(self) -> BrokenDataError:
    """The error for a source of which no example can be read."""
    return BrokenDataError(
      f"{self.source}: none of its {self.size} examples can be read."
    )

  def _line(self, index: int, why: str) -> str:
    return f"{self.source.describe(index)} cannot be read: {why}."


def reader_of(source: Source | Reader) -> Reader:
  """A reader itself; for a source one that allows no unreadable example."""
  return source if isinstance(source, Reader) else Reader(source)


def _too_many(lines: list[str], allowed: int, named: bool) -> str:
  """The message for too many unreadable examples; `named` in a command, too."""
  advice = f"config.data.max_bad ({allowed}) is how many may be left out."
  if named:
    advice = f"`memory-vit check_data` names all that is broken; {advice}"
  if len(lines) == 1:
    return f"{lines[0]} {advice}"
  shown = lines[:_SHOWN]
  if len(lines) > _SHOWN:
    shown.append(f"and {len(lines) - _SHOWN} more")
  return "\n  ".join(
    [f"{len(lines)} examples cannot be read. {advice}", *shown]
  )

"""Read a source, and note which of its examples cannot be read."""

import contextlib
import logging
import types
from collections.abc import Mapping, Sequence

from memory_vit.data import watchdog
from memory_vit.data.sources import Source
from memory_vit.errors import BrokenDataError
from memory_vit.runtime import processes

logger = logging.getLogger(__name__)

# Unreadable examples that a message lists.
_SHOWN = 20


class Reader:
  """A source, and how it is read in this process.

  Attributes:
    source: the split.
    max_bad: how many examples may be left out as they cannot be read.
    stall_timeout: seconds after which a process that waits for a batch is
      ended; 0 is never.
  """

  def __init__(
    self, source: Source, *, max_bad: int = 0, stall_timeout: float = 0.0
  ) -> None:
    """Begin with what was unreadable when the source was opened.

    Raises:
      BrokenDataError: where that is more than `max_bad`.
    """
    self.source = source
    self.max_bad = max_bad
    self.stall_timeout = stall_timeout
    self._unreadable: dict[int, str] = {}
    self.mark_unreadable(source.unreadable)

  @property
  def name(self) -> str:
    """The name of the data set."""
    return self.source.name

  @property
  def split(self) -> str:
    """The split, in the notation of TFDS."""
    return self.source.split

  @property
  def size(self) -> int:
    """The number of examples, unreadable ones too."""
    return self.source.size

  @property
  def class_names(self) -> tuple[str, ...]:
    """The names of the classes."""
    return self.source.class_names

  @property
  def num_classes(self) -> int:
    """The number of classes."""
    return self.source.num_classes

  @property
  def unreadable(self) -> Mapping[int, str]:
    """Index -> why, of the unreadable examples that this process knows."""
    return types.MappingProxyType(self._unreadable)

  def mark_unreadable(self, reasons: Mapping[int, str]) -> None:
    """Leave out examples that cannot be read; each is logged once.

    Args:
      reasons: index -> why.

    Raises:
      BrokenDataError: where they are more than `max_bad`, with those before.
    """
    new = {i: why for i, why in reasons.items() if i not in self._unreadable}
    if new and len(self._unreadable) + len(new) > self.max_bad:
      together = {**self._unreadable, **new}
      lines = [self._line(i, why) for i, why in together.items()]
      raise BrokenDataError(_too_many(lines, self.max_bad))
    for index, why in new.items():
      line = self._line(index, why)
      logger.warning("left out (%d may be): %s", self.max_bad, line)
    self._unreadable.update(new)

  def sync_unreadable(self) -> list[int]:
    """Share unreadable examples among all processes, which all must call.

    Each process meets those of its own share; from here on all know all.

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

  def time_limit(self, first: int) -> contextlib.AbstractContextManager:
    """End the process where reading from example `first` on stalls."""
    what = f"{self.source}, from example {first} on"
    return watchdog.limit(self.stall_timeout, what)

  def nothing_readable(self) -> BrokenDataError:
    """The error for a source of which no example can be read."""
    return BrokenDataError(
      f"{self.source}: none of its {self.size} examples can be read."
    )

  def _line(self, index: int, why: str) -> str:
    return f"{self.source.describe(index)} cannot be read: {why}."


def reader_of(source: Source | Reader) -> Reader:
  """A reader as it is; of a source one that allows no unreadable example."""
  return source if isinstance(source, Reader) else Reader(source)


def _too_many(lines: Sequence[str], allowed: int) -> str:
  """The message for more unreadable examples than are allowed."""
  advice = (
    "`python -m memory_vit.check_data` names all that is broken; "
    f"config.data.max_bad ({allowed}) is how many may be left out."
  )
  if len(lines) == 1:
    return f"{lines[0]} {advice}"
  more = len(lines) - _SHOWN
  shown = [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
  return f"{len(lines)} examples cannot be read. {advice}\n  " + "\n  ".join(
    shown
  )

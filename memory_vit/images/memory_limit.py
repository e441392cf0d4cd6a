"""A limit of memory that threads share while they decode images."""

import contextlib
import threading
from collections.abc import Iterator

from memory_vit.errors import DataError

_MIB = 2**20


class MemoryLimit:
  """Bytes that threads share; a thread waits until enough are left.

  While others are taken, `spare` bytes are left to threads that want no more.
  `option` is the one that sets the size, for messages.
  """

  def __init__(
    self, size: int, option: str = "--memory_mib", *, spare: int = 0
  ) -> None:
    self._size = self._left = size
    self._option = option
    self._spare = spare
    self._given_back = threading.Condition()
    # Held while a header is read, whose memory nobody knows before: it is
    # short, but a WebP file is read as a whole.
    self.header = threading.Lock()

  @contextlib.contextmanager
  def taken(self, size: int) -> Iterator[None]:
    """Take `size` bytes until the body ends; `DataError` if it is too much."""
    if size > self._size:
      raise DataError(
        f"decoding it may take {size / _MIB:,.0f} MiB, more than the "
        f"{self._size / _MIB:,.0f} MiB that {self._option} leaves beside a "
        "batch"
      )
    with self._given_back:
      self._given_back.wait_for(lambda: self._is_free(size))
      self._left -= size
    try:
      yield
    finally:
      with self._given_back:
        self._left += size
        self._given_back.notify_all()

  def _is_free(self, size: int) -> bool:
    kept = self._spare if size > self._spare else 0
    return self._left >= size + kept or self._left == self._size

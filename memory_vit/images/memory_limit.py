"""Limit the memory that threads use together while they decode images."""

import contextlib
import threading
from collections.abc import Iterator

from memory_vit.errors import DataError

_MIB = 2**20


class MemoryLimit:
  """A number of bytes that threads share; a thread waits until enough are free.

  A request for more than `spare` bytes must leave `spare` bytes free, unless no
  other request holds memory. `option` is the name of the limit in errors.
  """

  def __init__(
    self, size: int, option: str = "--memory_mib", *, spare: int = 0
  ) -> None:
    self._size = self._left = size
    self._option = option
    self._spare = spare
    self._given_back = threading.Condition()
    # A thread holds this lock while it reads a header, so that only one header
    # is read at a time. To find the header of some files, the whole file must
    # be read into memory, and the limit does not count that memory.
    self.header = threading.Lock()

  @contextlib.contextmanager
  def taken(self, size: int) -> Iterator[None]:
    """Hold `size` bytes in a `with` block; raise if they exceed the limit."""
    if size > self._size:
      raise DataError(
        f"decoding the image may take {size / _MIB:,.0f} MiB, more than the "
        f"{self._size / _MIB:,.0f} MiB of {self._option} that are not reserved "
        "for batches"
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
    reserved = self._spare if size > self._spare else 0
    return self._left >= size + reserved or self._left == self._size

"""Which batch size answers the waiting images the fastest, as measured.

On a CPU a batch of 8 takes about 8 times as long as one image, and padding is
lost time. On an accelerator both take about as long, and padding costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

# Of a new measurement, beside older ones.
_SHARE_OF_NEW = 0.2
# Seconds per image before anything was measured, to say when to come again.
_GUESS = 0.05


class Pace:
  """Measured seconds of a pass, for each batch size that is compiled."""

  def __init__(self, sizes: Sequence[int]) -> None:
    """Know nothing yet; `sizes` ascend."""
    self._sizes = tuple(sizes)
    self._measured: dict[int, float] = {}

  def rows(self, count: int) -> int:
    """Rows that are computed for images: full batches, and a padded one."""
    full, rest = divmod(count, self._sizes[-1])
    return full * self._sizes[-1] + (self._holding(rest) if rest else 0)

  def record(self, rows: int, seconds: float) -> None:
    """Note how long a pass of so many rows took; of several, nothing."""
    if rows in self._sizes:
      known = self._measured.get(rows, seconds)
      self._measured[rows] = known + _SHARE_OF_NEW * (seconds - known)

  def best_size(self, waiting: int) -> int:
    """The batch size that answers the most of the waiting images per second.

    Of those that can be filled, and the next larger one; a size that was never
    measured is taken as soon as images are left over for it.
    """
    largest = self._holding(waiting)
    best, best_rate = largest, 0.0
    for size in self._sizes:
      if size > largest:
        break
      seconds = self._seconds(size)
      if seconds is None:
        if size == largest:
          return size
        continue
      rate = min(waiting, size) / seconds
      if rate >= best_rate:
        best, best_rate = size, rate
    return best

  def seconds_per_image(self) -> float:
    """Seconds per image in the quickest of full batches, or a guess."""
    return min(
      (seconds / size for size, seconds in self._measured.items()),
      default=_GUESS,
    )

  def _holding(self, count: int) -> int:
    """The smallest size that holds so many, or the largest of all."""
    return next((s for s in self._sizes if s >= count), self._sizes[-1])

  def _seconds(self, size: int) -> float | None:
    """Seconds of a pass, at most in proportion to those of a smaller one.

    So one slow pass does not keep a size from ever being tried again.
    """
    if size not in self._measured:
      return None
    return min(
      seconds * max(1.0, size / other)
      for other, seconds in self._measured.items()
      if other <= size
    )

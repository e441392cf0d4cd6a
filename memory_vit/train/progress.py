"""Progress bar and log lines of a run."""

import logging
import time
from collections.abc import Mapping

from absl import logging as absl_logging

from memory_vit.runtime.progress_bar import (
  SILENCE_SECONDS,
  ProgressBar,
  duration,
  log_package,
)

logger = logging.getLogger(__name__)


class Progress:
  """Progress of training, as log lines or a bar on a terminal, with its speed.

  The clock starts with the first `resume`, after the step that compiles, and
  `pause` stops the clock during evaluations.
  """

  def __init__(
    self,
    name: str,
    start: int,
    total: int,
    batch_size: int,
    timed_steps: int = 0,
    timed_seconds: float = 0.0,
  ) -> None:
    self._name, self._total, self._batch_size = name, total, batch_size
    self._step, self._steps, self._seconds = start, timed_steps, timed_seconds
    self._since: float | None = None
    self._reported = time.perf_counter()
    self._bar = ProgressBar(
      name, total, "step", done=start, delay=0.0, stays=True, say=_nothing
    )

  def advance(self) -> None:
    """Count a dispatched step, and also a timed step if the clock runs."""
    self._step += 1
    self._bar.update()
    self._steps += self._since is not None

  def pause(self) -> bool:
    """Stop the clock and return whether it ran; no step may be in flight."""
    if self._since is None:
      return False
    self._seconds += time.perf_counter() - self._since
    self._since = None
    return True

  def resume(self) -> None:
    self._since = time.perf_counter()

  @property
  def timed(self) -> tuple[int, float]:
    """Number and seconds of timed steps since the run first started."""
    seconds = self._seconds
    if self._since is not None:
      seconds += time.perf_counter() - self._since
    return self._steps, seconds

  @property
  def images_per_second(self) -> float:
    """Training images per second over all processes; 0.0 before two steps."""
    steps, seconds = self.timed
    return steps * self._batch_size / seconds if steps else 0.0

  def is_overdue(self) -> bool:
    """Return whether the last report is half a minute old, by local clock."""
    return time.perf_counter() - self._reported >= SILENCE_SECONDS

  def report(self, values: Mapping[str, list[float]]) -> None:
    """Show the last step's metrics, as a range if there are several trials."""
    self._reported = time.perf_counter()
    shown = "  ".join(f"{key} {span(v)}" for key, v in values.items())
    if self._bar.is_bar:
      self._bar.note(shown)
      return
    if speed := self.images_per_second:  # 0 before the second step
      left = (self._total - self._step) * self._batch_size
      rounded = f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"
      shown += f"  {rounded} images/s  ETA {duration(left / speed)}"
    logger.info("%s step %d/%d  %s", self._name, self._step, self._total, shown)

  def close(self) -> None:
    self._bar.close()


def span(values: list[float]) -> str:
  """Format a range: [0.5] -> "0.5", [0.1, 0.3, 0.2] -> "0.1..0.3"."""
  least, greatest = f"{min(values):.4g}", f"{max(values):.4g}"
  return least if len(values) == 1 else f"{least}..{greatest}"


def _nothing(line: str) -> None:
  """Ignore log lines of `ProgressBar`: `Progress.report` logs better lines."""


def log_to_stderr(*, verbose: bool = False) -> None:
  """Show warnings of libraries; show log lines of this package above bars."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  log_package(verbose=verbose)

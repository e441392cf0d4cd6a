"""Profile a few training steps of a run, for TensorBoard."""

import logging
from pathlib import Path
from typing import Any

import jax

from memory_vit.runtime.files import Outbox

logger = logging.getLogger(__name__)


class Profile:
  """Profiler of five training steps, or fewer if the run ends before."""

  def __init__(self, logdir: Path | None, first: int, total: int) -> None:
    """Profile from step `first` on; profile nothing if `first` is 0."""
    self._first = first
    self._last = min(self._first + 4, total)
    self._logdir = logdir
    self._outbox: Outbox | None = None

  def __enter__(self) -> "Profile":
    return self

  def __exit__(self, *args: object) -> None:
    if self._outbox:
      self._stop(self._outbox)

  def before(self, step: int) -> None:
    if step == self._first and self._logdir:
      self._outbox = Outbox(self._logdir)
      jax.profiler.start_trace(str(self._outbox.local))

  def after(self, step: int, state: Any) -> None:
    """End the profile when its last step is computed, not only dispatched."""
    if self._outbox and step == self._last:
      jax.block_until_ready(state)
      self._stop(self._outbox)

  def _stop(self, outbox: Outbox) -> None:
    self._outbox = None
    try:
      jax.profiler.stop_trace()
      outbox.close()
    except Exception as error:  # full disks, and errors of TensorFlow
      logger.warning(
        "the profile cannot be written to %s: %s", self._logdir, error
      )

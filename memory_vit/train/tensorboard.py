"""TensorBoard events of a run, in a directory for each trial."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from memory_vit.runtime.files import Outbox
from memory_vit.train.metric_writers import Guard, Images, Scalars


class TensorBoard:
  """Events of the trials of a run, written by process 0."""

  def __init__(self, logdirs: Mapping[str, Path]) -> None:
    """Write the events of a trial into its directory; it is made then."""
    self.guard = Guard("TensorBoard")
    self._logdirs = logdirs if jax.process_index() == 0 else {}
    self._opened: dict[str, tuple[Any, Outbox]] = {}

  def write_scalars(self, step: int, scalars: Scalars) -> None:
    for trial, writer in self._of(scalars):
      writer.write_scalars(step, dict(scalars[trial]))

  def write_images(self, step: int, images: Images) -> None:
    for trial, writer in self._of(images):
      writer.write_images(step, dict(images[trial]))

  def flush(self) -> None:
    for writer, outbox in self._opened.values():
      writer.flush()
      outbox.send()

  def close(self) -> None:
    while self._opened:
      _, (writer, outbox) = self._opened.popitem()
      try:
        writer.close()
      finally:
        outbox.close()

  def _of(self, trials: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The writers of some trials, which share a pass."""
    from clu import metric_writers  # imports TensorFlow and keras

    # All trials of a sweep may be more than a process can have open files.
    if self._opened.keys().isdisjoint(trials):
      self.close()
    for trial in trials:
      if trial in self._logdirs:
        if trial not in self._opened:
          outbox = Outbox(self._logdirs[trial])
          writer = metric_writers.SummaryWriter(str(outbox.local))
          self._opened[trial] = writer, outbox
        yield trial, self._opened[trial][0]

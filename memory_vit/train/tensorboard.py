"""TensorBoard events of a run, in a directory for each trial."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epy

from memory_vit.runtime.files import Outbox
from memory_vit.train.metric_writers import Guard, Images, Scalars

with epy.lazy_imports():  # only needed if events are written
  from memory_vit.data import quiet_tensorflow


class EventFile:
  """Event file of a trial, written like in `clu`, but without keras."""

  def __init__(self, folder: Path) -> None:
    self._summary = quiet_tensorflow.tf.summary
    self._writer = self._summary.create_file_writer(str(folder))

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    with self._writer.as_default(step):
      for tag, value in scalars.items():
        self._summary.scalar(tag, value)

  def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
    with self._writer.as_default(step):
      for tag, image in images.items():
        self._summary.image(tag, image[None])

  def flush(self) -> None:
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class TensorBoard:
  """Events of the trials of a run, written by process 0.

  A trial whose events cannot be written does not affect other trials.
  """

  def __init__(self, logdirs: Mapping[str, Path]) -> None:
    """Store {trial: directory}; a directory is created at the first event."""
    self.guard = Guard("TensorBoard")
    self._logdirs = logdirs if jax.process_index() == 0 else {}
    self._guards = {
      trial: Guard(f"TensorBoard events of {trial!r} in {path}")
      for trial, path in self._logdirs.items()
    }
    # {trial of the current pass: stack that closes its event file and outbox}.
    self._closing: dict[str, contextlib.ExitStack] = {}
    # {trial of the current pass: (its open event file, its outbox)}.
    self._opened: dict[str, tuple[EventFile, Outbox]] = {}

  def write_scalars(self, step: int, scalars: Scalars) -> None:
    self._each(
      scalars,
      lambda trial: self._writer(trial).write_scalars(step, scalars[trial]),
    )

  def write_images(self, step: int, images: Images) -> None:
    self._each(
      images,
      lambda trial: self._writer(trial).write_images(step, images[trial]),
    )

  def flush(self) -> None:
    self._each([*self._opened], self._flush)

  def close(self) -> None:
    self._opened.clear()
    while self._closing:
      trial, closing = self._closing.popitem()
      self._guards[trial].close(closing.close)

  def _each(self, trials: Iterable[str], action: Callable[[str], Any]) -> None:
    """Call `action` for each of `trials`, which must be trials of one pass."""
    # Close the files of the previous pass, because a process can open only a
    # limited number of files.
    if self._closing.keys().isdisjoint(trials):
      self.close()
    for trial in trials:
      if trial in self._guards:
        self._guards[trial].attempt(functools.partial(action, trial))

  def _writer(self, trial: str) -> EventFile:
    if trial not in self._opened:
      closing = self._closing[trial] = contextlib.ExitStack()
      outbox = Outbox(self._logdirs[trial])
      closing.callback(outbox.close)
      writer = EventFile(outbox.local)
      closing.callback(writer.close)
      self._opened[trial] = writer, outbox
    return self._opened[trial][0]

  def _flush(self, trial: str) -> None:
    writer, outbox = self._opened[trial]
    writer.flush()
    outbox.send()

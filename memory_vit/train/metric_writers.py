"""Metric writers of a run; a writer that fails does not stop the others."""

import collections
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from memory_vit.runtime.messages import named

logger = logging.getLogger(__name__)

# Scalars are {trial: {tag: number}}. Images are {trial: {tag: image}}; an image
# is uint8 (height, width, 3).
Scalars = Mapping[str, Mapping[str, float]]
Images = Mapping[str, Mapping[str, np.ndarray]]


class Guard:
  """Guard that stops using a writer once it fails, with one warning."""

  def __init__(self, title: str) -> None:
    self.title, self.failed = title, False

  def attempt(self, action: Callable[[], object]) -> None:
    """Run `action`, unless the writer has failed before."""
    if not self.failed:
      try:
        action()
      except Exception as error:  # network, disk or library errors
        self.failed = True
        logger.warning(
          "%s cannot be written; training continues without it (%s)",
          self.title, named(error),
        )  # fmt: skip

  def close(self, action: Callable[[], object]) -> None:
    """Close the writer, even after a failure; warn if data were not written."""
    failed, self.failed = self.failed, False
    self.attempt(action)
    self.failed = self.failed or failed
    if self.failed:
      logger.warning("%s: not all of this run was written", self.title)


class MetricWriter(Protocol):
  """Interface of metric writers; methods are named as in `clu`.

  All processes call the methods. After an error, `guard` drops the writer.
  """

  guard: Guard

  def write_scalars(self, step: int, scalars: Scalars) -> None: ...

  def write_images(self, step: int, images: Images) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


class MetricWriters:
  """Several writers, each under its guard; false if there are no writers."""

  def __init__(self, *writers: MetricWriter) -> None:
    self._writers = writers

  def __bool__(self) -> bool:
    return bool(self._writers)

  def __enter__(self) -> "MetricWriters":
    return self

  def __exit__(self, *args: object) -> None:
    for writer in self._writers:
      writer.guard.close(writer.close)

  def write_scalars(self, step: int, scalars: Scalars) -> None:
    for writer in self._writers:
      writer.guard.attempt(
        functools.partial(writer.write_scalars, step, scalars)
      )

  def write_images(self, step: int, images: Images) -> None:
    for writer in self._writers:
      writer.guard.attempt(functools.partial(writer.write_images, step, images))

  def flush(self) -> None:
    for writer in self._writers:
      writer.guard.attempt(writer.flush)


class History:
  """Writer that keeps metrics in memory, for callers in Python."""

  def __init__(self) -> None:
    self.guard = Guard("the history")
    self._points: dict[str, dict[str, dict[int, float]]] = (
      collections.defaultdict(lambda: collections.defaultdict(dict))
    )

  def curves(self, trial: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return {tag: (steps int64 (k,), values float64 (k,))} of a trial."""
    return {
      tag: (np.array([*points], np.int64), np.array([*points.values()]))
      for tag, points in self._points[trial].items()
    }

  def write_scalars(self, step: int, scalars: Scalars) -> None:
    for trial, values in scalars.items():
      for tag, value in values.items():
        # Round to float32, like the event files of TensorBoard.
        self._points[trial][tag][step] = float(np.float32(value))

  def write_images(self, step: int, images: Images) -> None:
    """Do nothing: a history has no images."""

  def flush(self) -> None:
    """Do nothing: there is no file to write to."""

  def close(self) -> None:
    """Do nothing: there is no file to close."""

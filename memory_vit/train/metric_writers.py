"""Writers of metrics of a run: one that fails is given up alone."""

import collections
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from memory_vit.runtime.messages import named

logger = logging.getLogger(__name__)

# {trial: {tag: value}}, and uint8 (height, width, 3) in place of the value.
Scalars = Mapping[str, Mapping[str, float]]
Images = Mapping[str, Mapping[str, np.ndarray]]


class Guard:
  """Gives up a writer that fails, with one warning."""

  def __init__(self, title: str) -> None:
    self.title, self.failed = title, False

  def attempt(self, action: Callable[[], object]) -> None:
    """Do something, unless the writer has failed before."""
    if not self.failed:
      try:
        action()
      except Exception as error:  # of the network, full disks, libraries
        self.failed = True
        logger.warning(
          "%s cannot be written, training continues without (%s)",
          self.title, named(error),
        )  # fmt: skip

  def close(self, action: Callable[[], object]) -> None:
    """Close what is open, even after a failure; say if something is missing."""
    failed, self.failed = self.failed, False
    self.attempt(action)
    self.failed = self.failed or failed
    if self.failed:
      logger.warning("%s: not all of this run was written", self.title)


class MetricWriter(Protocol):
  """Writes metrics of trials; its methods are named as in `clu`.

  All processes call them. They may raise anything: `guard` gives the writer up.
  """

  guard: Guard

  def write_scalars(self, step: int, scalars: Scalars) -> None: ...

  def write_images(self, step: int, images: Images) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


class MetricWriters:
  """Several writers, each guarded; false if there are none."""

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
  """Metrics in memory, for a caller in Python."""

  def __init__(self) -> None:
    self.guard = Guard("the history")
    self._points: dict[str, dict[str, dict[int, float]]] = (
      collections.defaultdict(lambda: collections.defaultdict(dict))
    )

  def curves(self, trial: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{tag: (steps int64 (k,), values float64 (k,))} of a trial."""
    return {
      tag: (np.array([*points], np.int64), np.array([*points.values()]))
      for tag, points in self._points[trial].items()
    }

  def write_scalars(self, step: int, scalars: Scalars) -> None:
    for trial, values in scalars.items():
      for tag, value in values.items():
        # In float32, as events have it.
        self._points[trial][tag][step] = float(np.float32(value))

  def write_images(self, step: int, images: Images) -> None:
    """Images are no part of a history."""

  def flush(self) -> None:
    """Nothing waits to be written."""

  def close(self) -> None:
    """Nothing is open."""

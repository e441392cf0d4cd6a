"""Compute what is kept of a split: one pass over its fixed views."""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit.data.fixed_views import FixedViews
from memory_vit.kept.embedded_views import EmbeddedViews
from memory_vit.kept.rows import Rows
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import StopSignal

logger = logging.getLogger(__name__)

# Seconds between progress lines.
_EVERY = 10.0


class PassProgress:
  """Lines that say how far a pass over images is, and when it will end."""

  def __init__(self, what: str, total: int) -> None:
    self._what, self._total, self._done = what, total, 0
    self._began = self._said = time.perf_counter()

  def advance(self, images: int) -> None:
    """Count images, and say so if nothing was said for ten seconds."""
    self._done = min(self._total, self._done + images)
    now = time.perf_counter()
    if now - self._said < _EVERY and self._done < self._total:
      return
    self._said, seconds = now, now - self._began
    speed = self._done / max(seconds, 1e-9)
    left = (self._total - self._done) / speed
    logger.info(
      "%s: %d/%d images, %.0f images/s, %s", self._what, self._done,
      self._total, speed,
      f"{left:.0f} s left" if left else f"{seconds:.1f} s",
    )  # fmt: skip


def compute(
  views: FixedViews | EmbeddedViews,
  starts: range,
  prepare: Callable[[Any], Any],
  rows: Rows,
  *,
  mesh: Mesh,
  stop: StopSignal,
  progress: PassProgress,
) -> None:
  """Put the inputs of some places into `rows`; all processes must call.

  Embeddings are inputs already: nothing is computed of them.

  Args:
    views: of the split, or its embeddings.
    starts: places at which the batches of this process start, one after the
      other; as many on every process.
    prepare: images (b, side, side, 3) -> inputs, frozen.
    rows: where they go.
    mesh: over which a batch is split.
    stop: is asked in every batch.
    progress: counts images of all processes.

  Raises:
    Interrupted: where it was asked to stop.
  """
  size = starts.step
  batches = views.batches(starts, size)
  for start, batch in zip(starts, batches, strict=True):
    stop.check()
    given = "inputs" if "inputs" in batch else "image"
    inputs = sharding.shard_batch(batch[given], mesh)
    if given == "image":
      inputs = prepare(inputs)
    rows.put(start, inputs, batch)
    jax.block_until_ready(inputs)
    progress.advance(size * jax.process_count())

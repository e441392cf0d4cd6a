"""Compute what is kept of a split: one pass over its fixed views."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from memory_vit.data.fixed_views import FixedViews
from memory_vit.frozen.embedded_views import EmbeddedViews
from memory_vit.frozen.rows import Rows
from memory_vit.runtime import sharding
from memory_vit.runtime.preemption import StopSignal
from memory_vit.runtime.progress_bar import ProgressBar


def compute(
  views: FixedViews | EmbeddedViews,
  starts: range,
  prepare: Callable[[Any], Any],
  rows: Rows,
  *,
  mesh: Mesh,
  stop: StopSignal,
  progress: ProgressBar,
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
    key = "inputs" if "inputs" in batch else "image"
    inputs = sharding.shard_batch(batch[key], mesh)
    if key == "image":
      inputs = prepare(inputs)
    rows.put(start, inputs, batch)
    jax.block_until_ready(inputs)
    progress.update(size * jax.process_count())

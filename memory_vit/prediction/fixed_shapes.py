"""Run the model on any number of images, in batches of a few fixed sizes."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

from memory_vit.model.backbone import Backbone
from memory_vit.tasks import inference
from memory_vit.tasks.program import Program


class Outputs(NamedTuple):
  """Outputs for k images: logits by task name; None for unrequested arrays."""

  logits: dict[str, Float32[np.ndarray, "k _"]]
  original: Float32[np.ndarray, "k c0"] | None
  features: Float32[np.ndarray, "k l n d"] | None


class BatchOutputs(NamedTuple):
  """Outputs of a padded batch; t is 1 for a task that runs alone."""

  logits: Float32[np.ndarray, "b t c"] | None
  original: Float32[np.ndarray, "b c0"] | None
  features: Float32[np.ndarray, "b l n d"] | None

  def cut(self, count: int, heads: Heads) -> Outputs:
    """Return the first `count` rows, with copies of the logits of each task."""
    logits = self.logits
    return Outputs(
      {}
      if logits is None
      else {
        name: logits[:count, slot, :classes].copy()
        for name, (slot, classes) in heads.items()
      },
      *(None if a is None else a[:count] for a in self[1:]),
    )


# {task name: (index of the task in axis 1 of the logits, number of classes)}.
Heads = Mapping[str, tuple[int, int]]


class FixedShapes:
  """Runs the model in batches of a few sizes; creating it compiles nothing."""

  def __init__(self, backbone: Backbone, batch_sizes: Sequence[int]) -> None:
    self._backbone, self._sizes = backbone, tuple(batch_sizes)
    # {`Program.shapes`: batch sizes that are compiled for these shapes}.
    # Threads add sizes without a lock.
    self._compiled: dict[Hashable, set[int]] = {}

  def run(
    self,
    parts: Iterable[Float32[np.ndarray, "_ side side 3"]],
    program: Program,
    heads: Heads,
    *,
    original: bool,
    features: bool,
  ) -> Outputs:
    """Answer the images in `parts`; finish each part before taking the next."""
    wanted = bool(heads), original, features
    sizes = self.compiled(program) or self._sizes
    outputs = [
      self._run_batch(batch, program, *wanted).cut(count, heads)
      for pixels in parts
      for batch, count in padded_batches(pixels, sizes)
    ]
    if not outputs:
      outputs = [self._of_no_image(heads, original, features)]
    logits, *arrays = zip(*outputs, strict=True)
    return Outputs(
      {
        name: np.concatenate([batch[name] for batch in logits])
        for name in heads
      },
      *(None if a[0] is None else np.concatenate(a) for a in arrays),
    )

  def compiled(self, program: Program) -> tuple[int, ...]:
    """Return the batch sizes that `compile` has compiled, ascending."""
    ready = self._compiled.get(program.shapes, ())
    return tuple(size for size in self._sizes if size in ready)

  def compile(self, program: Program, size: int, *, features: bool) -> None:
    """Compile by a real pass, which gives keys and values their real layout."""
    batch = np.zeros((size, *self._image_shape), np.float32)
    self._run_batch(batch, program, True, True, features)
    self._compiled.setdefault(program.shapes, set()).add(size)

  @property
  def _image_shape(self) -> tuple[int, int, int]:
    side = self._backbone.config.image_size
    return side, side, 3

  def _run_batch(
    self,
    batch: Float32[np.ndarray, "b side side 3"],
    program: Program,
    tasks: bool,
    original: bool,
    features: bool,
  ) -> BatchOutputs:
    """Start all computations of a batch, then fetch and return its outputs."""
    config, params = self._backbone.config, self._backbone.for_programs
    images = jax.device_put(batch)
    summary = None
    logits, outputs = program.stacked(
      self._backbone, images, tasks=tasks, original=original
    )
    if features:
      tokens = inference.summary_program(params, images, config=config)
      summary = np.asarray(tokens).reshape(
        len(batch), config.depth, -1, config.width
      )
    return BatchOutputs(
      None
      if logits is None
      else np.asarray(logits).reshape(len(batch), -1, logits.shape[-1]),
      None if outputs is None else np.asarray(outputs),
      summary,
    )

  def _of_no_image(
    self, heads: Heads, original: bool, features: bool
  ) -> Outputs:
    """Return the outputs for 0 images: arrays with a first axis of length 0."""
    config, params = self._backbone.config, self._backbone.params
    batch = jax.ShapeDtypeStruct((1, *self._image_shape), np.float32)
    outputs, _ = jax.eval_shape(
      functools.partial(inference.encode_program, config=config), params, batch
    )
    n = config.summary_tokens // config.depth
    return Outputs(
      {name: np.zeros((0, c), np.float32) for name, (_, c) in heads.items()},
      np.zeros((0, outputs.shape[1]), np.float32) if original else None,
      np.zeros((0, config.depth, n, config.width), np.float32)
      if features
      else None,
    )


def padded_batches(
  pixels: Float32[np.ndarray, "k side side 3"], sizes: Sequence[int]
) -> Iterator[tuple[Float32[np.ndarray, "b side side 3"], int]]:
  """Yield padded batches, each with its number of images before padding."""
  largest = sizes[-1]
  for start in range(0, len(pixels), largest):
    part = pixels[start : start + largest]
    size = next(size for size in sizes if size >= len(part))
    if size > len(part):
      batch = np.zeros((size, *pixels.shape[1:]), np.float32)
      batch[: len(part)] = part
      yield batch, len(part)
    else:
      yield part, size

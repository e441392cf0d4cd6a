"""Run the model on any number of images, in batches of a few fixed sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

from memory_vit.model.backbone import Backbone
from memory_vit.model.stacking import SlotArrays
from memory_vit.tasks import inference


class Outputs(NamedTuple):
  """What a pass hands out, on the host; None is what was not asked for.

  Attributes:
    logits: of all slots.
    original: the original outputs.
    features: class token and mean patch after each block, standardized.
  """

  logits: Float32[np.ndarray, "k t c"] | None
  original: Float32[np.ndarray, "k c0"] | None
  features: Float32[np.ndarray, "k l n d"] | None


class FixedShapes:
  """The programs of a backbone, for batches of a few sizes.

  They are those of `inference`, with whatever tasks lie in the slots.
  """

  def __init__(self, backbone: Backbone, batch_sizes: Sequence[int]) -> None:
    """Compile nothing yet; sizes ascend."""
    self._backbone, self._sizes = backbone, tuple(batch_sizes)

  def run(
    self,
    pixels: Float32[np.ndarray, "k side side 3"],
    slots: SlotArrays | None,
    *,
    original: bool,
    features: bool,
  ) -> Outputs:
    """Run the model.

    Args:
      pixels: prepared images, any number of them.
      slots: tasks that are read; None for none.
      original: whether the original outputs are wanted.
      features: whether those of each block are wanted: a second pass.
    """
    parts = [
      Outputs(*(None if a is None else a[:count] for a in outputs))
      for batch, count in padded_batches(pixels, self._sizes)
      for outputs in (self._run_batch(batch, slots, original, features),)
    ]
    if not parts:
      parts = [self._of_no_image(slots, original, features)]
    return Outputs(
      *(
        None if found[0] is None else np.concatenate(found)
        for found in zip(*parts, strict=True)
      )
    )

  def warm_up(self, slots: SlotArrays, *, features: bool) -> None:
    """Compile what images need, and what reads the tasks."""
    for size in self._sizes:
      batch = np.zeros((size, *self._image_shape), np.float32)
      self._run_batch(batch, None, original=True, features=features)
    self.compile_reading(slots)

  def compile_reading(self, slots: SlotArrays) -> None:
    """Compile what reads tasks, in slots of this room."""
    config, params = self._backbone.config, self._backbone.params
    for size in self._sizes:
      batch = jax.ShapeDtypeStruct((size, *self._image_shape), np.float32)
      _, context = inference.encode_program.eval_shape(
        params, batch, config=config
      )
      # Computed, it would have the same shapes, and take a pass.
      zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), context)
      logits = inference.read_program(
        params, slots, jax.device_put(zeros), config=config
      )
      jax.block_until_ready(logits)

  @property
  def _image_shape(self) -> tuple[int, int, int]:
    side = self._backbone.config.image_size
    return side, side, 3

  def _run_batch(
    self,
    batch: Float32[np.ndarray, "b side side 3"],
    slots: SlotArrays | None,
    original: bool,
    features: bool,
  ) -> Outputs:
    """Run programs on a batch, all before the first result is waited for."""
    config, params = self._backbone.config, self._backbone.params
    images = jax.device_put(batch)
    outputs = logits = summary = None
    if original or slots is not None:
      outputs, context = inference.encode_program(params, images, config=config)
      if slots is not None:
        logits = inference.read_program(params, slots, context, config=config)
      del context  # the largest of all
    if features:
      summary = inference.summary_program(params, images, config=config)
      summary = np.asarray(summary).reshape(
        len(batch), config.depth, -1, config.width
      )
    return Outputs(
      None if logits is None else np.asarray(logits),
      np.asarray(outputs) if original else None,
      summary,
    )

  def _of_no_image(
    self, slots: SlotArrays | None, original: bool, features: bool
  ) -> Outputs:
    """Outputs of the right shapes, with no row."""
    config, params = self._backbone.config, self._backbone.params
    batch = jax.ShapeDtypeStruct((1, *self._image_shape), np.float32)
    outputs, _ = inference.encode_program.eval_shape(
      params, batch, config=config
    )
    n = config.summary_tokens // config.depth
    return Outputs(
      np.zeros((0, *slots.bias.shape), np.float32) if slots else None,
      np.zeros((0, outputs.shape[1]), np.float32) if original else None,
      np.zeros((0, config.depth, n, config.width), np.float32)
      if features
      else None,
    )


def padded_batches(
  pixels: Float32[np.ndarray, "k side side 3"], sizes: Sequence[int]
) -> Iterator[tuple[Float32[np.ndarray, "b side side 3"], int]]:
  """Yield batches, and how many images of each are no padding.

  Args:
    pixels: any number of images, also none.
    sizes: of batches, ascending. Images are cut into the largest; what is left
      is padded with zeros to the smallest that holds it.
  """
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

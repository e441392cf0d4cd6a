"""StableHLO: one file that `jax.export` reads on CPU, CUDA and TPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export
from jaxtyping import Array

from memory_vit.errors import ExportError
from memory_vit.exports import resize
from memory_vit.exports.image_input import ImageInput
from memory_vit.exports.program import Logits, Program

FILE = "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "tpu")
# The file is a flatbuffer, which counts its bytes in 31 bits.
_MAX_BYTES = 2**31 - 2**24


def write(program: Program, directory: Path, images: ImageInput) -> None:
  """Write `model.stablehlo`: for any batch, and for any size of uint8 images.

  Raises:
    ExportError: for weights that do not fit into one file.
  """
  if program.weight_bytes > _MAX_BYTES:
    raise ExportError(
      f"the weights take {program.weight_bytes:,} bytes, and a StableHLO file "
      f"holds at most {_MAX_BYTES:,}. Give --format=saved_model."
    )
  exported = jax_export.export(
    jax.jit(with_input(program, images)), platforms=PLATFORMS
  )(_input_shape(program, images))
  (directory / FILE).write_bytes(exported.serialize())


def with_input(program: Program, images: ImageInput) -> Any:
  """The function of images alone: its weights are constants."""
  evaluation = program.evaluation

  def predict(pixels: Array) -> Logits:
    if images.kind == "uint8":
      pixels = resize.prepare(pixels, evaluation)
    return program.run(program.weights, pixels)

  return predict


def _input_shape(program: Program, images: ImageInput) -> jax.ShapeDtypeStruct:
  """Shape of the images, with symbols for what may be anything."""
  if images.kind == "uint8":
    height, width = images.size or ("h", "w")
    shape = jax_export.symbolic_shape(f"b, {height}, {width}, 3")
    return jax.ShapeDtypeStruct(shape, jnp.uint8)
  side = program.evaluation.image_size
  shape = jax_export.symbolic_shape(f"b, {side}, {side}, 3")
  return jax.ShapeDtypeStruct(shape, jnp.float32)

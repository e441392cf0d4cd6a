"""Export to StableHLO, which `jax.export` reads on CPU, CUDA and TPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export
from jaxtyping import Array

from memory_vit.errors import ExportError
from memory_vit.exports import resize
from memory_vit.exports.exported_model import ExportedModel
from memory_vit.exports.image_input import ImageInput
from memory_vit.tasks.split_forward import Logits

FILE = "model.stablehlo"
PLATFORMS = ("cpu", "cuda", "tpu")
# Maximum bytes of weights. The file, a flatbuffer, must be below 2**31 bytes.
_MAX_BYTES = 2**31 - 2**24


def write(exported: ExportedModel, directory: Path, images: ImageInput) -> None:
  """Write `model.stablehlo`, which takes batches of any size."""
  if exported.weight_bytes > _MAX_BYTES:
    raise ExportError(
      f"the weights take {exported.weight_bytes:,} bytes, but a StableHLO file "
      f"holds at most {_MAX_BYTES:,}. Give --format=saved_model."
    )
  written = jax_export.export(
    jax.jit(with_input(exported, images)), platforms=PLATFORMS
  )(input_shape(exported, images))
  (directory / FILE).write_bytes(written.serialize())


def with_input(exported: ExportedModel, images: ImageInput) -> Any:
  """Return a function that takes only images; the weights are constants."""
  preprocessing = exported.preprocessing

  def predict(pixels: Array) -> Logits:
    if images.kind == "uint8":
      pixels = resize.prepare(pixels, preprocessing)
    return exported.run(exported.weights, pixels)

  return predict


def input_shape(
  exported: ExportedModel, images: ImageInput
) -> jax.ShapeDtypeStruct:
  """Return the shape of the images, with symbols for axes of any length."""
  shape = images.shape(exported.preprocessing.image_size)
  symbolic = jax_export.symbolic_shape(", ".join(map(str, shape)))
  return jax.ShapeDtypeStruct(symbolic, images.kind)

"""Export to ONNX, by jax2onnx, for onnxruntime and other readers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from jaxtyping import Array, Float32

from memory_vit.errors import ExportError
from memory_vit.exports import stablehlo
from memory_vit.exports.exported_model import ExportedModel
from memory_vit.exports.image_input import ImageInput
from memory_vit.runtime.messages import first_line, not_installed

FILE, INPUT = "model.onnx", "images"
INSTALL_CONVERTER = "pip install --no-deps jax2onnx==0.17.1"


def require_possible(exported: ExportedModel, images: ImageInput) -> None:
  """Raise if the export cannot be written as ONNX."""
  if exported.backbone.config.dtype != "float32":
    raise ExportError(
      "--format=onnx with --dtype=bfloat16: onnxruntime has no bfloat16 "
      "kernels for the CPU. Give --dtype=float32."
    )
  if images.kind == "uint8" and not images.size:
    raise ExportError(
      "--format=onnx with --input=uint8 needs --input_size=HEIGHTxWIDTH: the "
      "converter supports only images of a fixed size."
    )
  if INPUT in exported.names:
    raise ExportError(
      f"--format=onnx: a task has the name of the model's input, {INPUT!r}: "
      "rename the task (mv.rename)."
    )


def write(exported: ExportedModel, directory: Path, images: ImageInput) -> None:
  """Write `model.onnx`, and `model.onnx.data` for large weights."""
  jax2onnx = require_installed()
  predict = stablehlo.with_input(exported, images)

  def in_order(pixels: Array) -> tuple[Float32[Array, "b _"], ...]:
    outputs = predict(pixels)
    return tuple(outputs[name] for name in exported.names)

  try:
    with _quiet():
      jax2onnx.to_onnx(
        in_order,
        [stablehlo.input_shape(exported, images)],
        model_name="memory_vit",
        return_mode="file",
        output_path=directory / FILE,
        input_names=[INPUT],
        output_names=list(exported.names),
      )
    # jax2onnx lets only the owner read `model.onnx.data`: give all files the
    # mode of `model.onnx`.
    mode = (directory / FILE).stat().st_mode
    for file in directory.iterdir():
      file.chmod(mode)
  # jax2onnx raises errors of any type if it cannot convert an operation.
  except Exception as error:
    raise ExportError(
      f"jax2onnx cannot convert this model: {first_line(error)}. Give "
      "--format=stablehlo or saved_model, and report this as a bug."
    ) from error


def require_installed() -> ModuleType:
  """Import the converter; raise if it or onnxruntime is not installed."""
  try:
    import jax2onnx
    import onnxruntime  # noqa: F401 - it runs the file afterwards
  except ModuleNotFoundError as error:
    raise ExportError(
      f"{not_installed('--format=onnx', error.name, 'onnx')} && "
      f"{INSTALL_CONVERTER} (docs/export.md explains --no-deps)."
    ) from error
  return jax2onnx


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Silence harmless warnings of onnx_ir about shapes."""
  logger = logging.getLogger("onnx_ir")
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)

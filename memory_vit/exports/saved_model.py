"""Export a SavedModel for TensorFlow Serving, by `jax.experimental.jax2tf`.

It has two signatures: `serving_default` takes images as arrays, and `encoded`
the bytes of JPEG and PNG files, which TensorFlow decodes, crops and scales as
in evaluation, but does not rotate as EXIF says. The weights are variables of
the SavedModel, so they may have any size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax

from memory_vit.errors import ExportError
from memory_vit.exports.exported_model import ExportedModel, flat_weights
from memory_vit.exports.image_input import ImageInput
from memory_vit.exports.stablehlo import PLATFORMS
from memory_vit.runtime.messages import not_installed

DIRECTORY = "saved_model"
_JPEG = b"\xff\xd8\xff"
# TensorFlow function that takes float32 images (b, side, side, 3), and returns
# {name of an output: logits (b, c)}.
_Predict = Callable[[Any], dict[str, Any]]


def batch_buckets() -> tuple[int, ...]:
  """Return the batch sizes that are compiled; () if any size can run.

  For batches of any size, jax since 0.11 writes shape checks in a form of
  StableHLO that TensorFlow 2.21 cannot read: the graph would fail when it runs.
  With jax 0.11 or later, batches are split and padded to these sizes.
  """
  return (1, 8, 32) if jax.__version_info__ >= (0, 11) else ()


def write(exported: ExportedModel, directory: Path, images: ImageInput) -> None:
  """Write the directory `saved_model`."""
  tf = require_installed()
  module = tf.Module()
  module.weights = [
    tf.Variable(array, trainable=False) for array in flat_weights(exported)
  ]
  predict = _converted(tf, exported, module.weights)
  signatures = {
    "serving_default": _from_images(tf, exported, predict, images),
    "encoded": _from_files(tf, exported, predict),
  }
  tf.saved_model.save(module, str(directory / DIRECTORY), signatures)


def require_installed() -> ModuleType:
  """Import TensorFlow so that it reserves no GPU memory, which jax needs."""
  try:
    from memory_vit.data.quiet_tensorflow import tf
  except ModuleNotFoundError as error:
    raise ExportError(
      not_installed("--format=saved_model", error.name, "train")
    ) from error
  return cast(ModuleType, tf)


def _converted(
  tf: Any, exported: ExportedModel, variables: list[Any]
) -> _Predict:
  """Return a TensorFlow function that runs `exported` on any batch size."""
  from jax.experimental import jax2tf

  tree = jax.tree.structure(exported.weights)
  side = exported.preprocessing.image_size

  def run(arrays: list[Any], images: Any) -> dict[str, Any]:
    return exported.run(jax.tree.unflatten(tree, arrays), images)

  def converted(batch: str) -> _Predict:
    function = jax2tf.convert(
      run,
      polymorphic_shapes=[None, f"({batch}, {side}, {side}, 3)"],
      with_gradient=False,
      native_serialization_platforms=PLATFORMS,
    )
    return lambda images: function(variables, images)

  buckets = batch_buckets()
  if not buckets:
    return converted("b")
  by_size = {size: converted(str(size)) for size in buckets}
  return lambda images: _in_buckets(tf, by_size, images, exported.names)


def _in_buckets(
  tf: Any, by_size: dict[int, _Predict], images: Any, names: tuple[str, ...]
) -> dict[str, Any]:
  """Pad or split `images` to sizes of `by_size`; return {name: output}."""
  count = tf.shape(images)[0]

  def in_parts(size: int) -> dict[str, Any]:
    parts = tf.maximum(1, (count + size - 1) // size)
    filled = tf.pad(images, [[0, parts * size - count], [0, 0], [0, 0], [0, 0]])
    shape = tf.concat([[parts, size], tf.shape(images)[1:]], axis=0)
    split = tf.ensure_shape(
      tf.reshape(filled, shape), (None, size, *images.shape[1:])
    )
    outputs = tf.map_fn(
      by_size[size], split, fn_output_signature=dict.fromkeys(names, tf.float32)
    )
    return {
      name: tf.reshape(out, (parts * size, out.shape[-1]))[:count]
      for name, out in outputs.items()
    }

  sizes = sorted(by_size)
  chosen = tf.reduce_sum(tf.cast(count > tf.constant(sizes[:-1]), tf.int32))
  branches = [lambda size=size: in_parts(size) for size in sizes]
  outputs: dict[str, Any] = tf.switch_case(chosen, branches)
  return outputs


def _from_images(
  tf: Any, exported: ExportedModel, predict: _Predict, images: ImageInput
) -> Any:
  """Return the signature whose input `images` is an array of images."""
  side = exported.preprocessing.image_size
  if images.kind == "float32":
    spec = tf.TensorSpec((None, side, side, 3), tf.float32, name="images")
    return tf.function(predict, autograph=False, input_signature=[spec])
  height, width = images.size or (None, None)
  spec = tf.TensorSpec((None, height, width, 3), tf.uint8, name="images")
  view = _view(exported)
  return tf.function(
    lambda images: predict(_each(tf, view, images, side)),
    autograph=False,
    input_signature=[spec],
  )


def _from_files(tf: Any, exported: ExportedModel, predict: _Predict) -> Any:
  """Return the signature whose input `encoded` is the bytes of image files.

  The EXIF orientation is ignored: no TensorFlow operation reads EXIF.
  """
  side = exported.preprocessing.image_size
  view = _view(exported)

  def prepare(encoded: Any) -> Any:
    is_jpeg = tf.strings.substr(encoded, 0, len(_JPEG)) == _JPEG
    pixels = tf.cond(
      is_jpeg,
      lambda: tf.io.decode_jpeg(encoded, 3),
      lambda: tf.io.decode_png(encoded, 3),
    )
    return view(tf.ensure_shape(pixels, (None, None, 3)))

  return tf.function(
    lambda encoded: predict(_each(tf, prepare, encoded, side)),
    autograph=False,
    input_signature=[tf.TensorSpec((None,), tf.string, name="encoded")],
  )


def _view(exported: ExportedModel) -> Callable[[Any], Any]:
  """Return a function that preprocesses one image (height, width, 3)."""
  from memory_vit.data import image_ops

  return lambda pixels: image_ops.graph_view(pixels, exported.preprocessing)


def _each(
  tf: Any, function: Callable[[Any], Any], batch: Any, side: int
) -> Any:
  """Apply `function` to each image or file; return (b, side, side, 3)."""
  spec = tf.TensorSpec((side, side, 3), tf.float32)
  prepared = tf.map_fn(function, batch, fn_output_signature=spec)
  return tf.ensure_shape(prepared, (None, side, side, 3))

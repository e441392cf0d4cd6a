"""Decode, crop and scale images for the model in TensorFlow.

Nothing is random here: `random_decisions` chooses the crops. Images are resized
bilinearly without antialiasing, in float32 without intermediate rounding, as in
vit_jax, unless an `EvalPreprocessing` says otherwise. Alpha is dropped, as in
TensorFlow. Files that `oriented` marked are turned, with the same result as if
they were stored upright. `memory_vit.images` prepares images for evaluation
without TensorFlow.
"""

import numpy as np
import PIL

from memory_vit.config import DataConfig
from memory_vit.data import (
  crop_sizes,
  python_op,
  random_decisions,
  raw_images,
  string_ops,
)
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.errors import ConfigError
from memory_vit.images import decoding, exif, jpeg, view
from memory_vit.images.view import LONGEST_ASPECT, MAX_RESIZED_PIXELS
from memory_vit.model.task import EvalPreprocessing


def decoders() -> dict[str, str]:
  """Identify image decoding: versions of the libraries, and use of EXIF."""
  return {
    "tensorflow": tf.__version__, "pillow": PIL.__version__, "exif": "turned",
  }  # fmt: skip


def train_image(
  encoded: tf.Tensor,
  uniforms: tf.Tensor,
  *,
  data: DataConfig,
  image_size: int,
  interpolation: str = "bilinear",
) -> tf.Tensor:
  """Crop an encoded image at random: float32 (side, side, 3) in [-1, 1].

  The crop follows from `uniforms`, see `random_decisions`. Without mirroring,
  the crop "resize" is bitwise identical to an evaluation with `interpolation`.
  """
  if data.train_crop == "inception":
    image = scale(resize(inception_crop(encoded, uniforms), image_size))
  elif data.train_crop == "small":
    side = crop_sizes.shorter_side(data.resize, image_size)
    image = resize_shorter(decode(encoded), side)
    image = scale(_random_square(image, uniforms, image_size))
  elif data.train_crop == "resize":
    squeezed = EvalPreprocessing(
      image_size=image_size, interpolation=interpolation
    )
    image = eval_image(encoded, squeezed)
  else:
    raise ConfigError(
      f"config.data.train_crop is {data.train_crop!r}, expected 'inception', "
      "'small' or 'resize'."
    )
  if not data.flip:
    return image
  return tf.cond(
    random_decisions.is_mirrored(uniforms),
    lambda: tf.reverse(image, [1]),
    lambda: image,
  )


def eval_image(
  encoded: tf.Tensor, preprocessing: EvalPreprocessing
) -> tf.Tensor:
  """Prepare an encoded image, string (), for evaluation: see `eval_view`."""
  return eval_view(decode(encoded), preprocessing)


def eval_view(image: tf.Tensor, preprocessing: EvalPreprocessing) -> tf.Tensor:
  """Prepare a decoded image, uint8 (height, width, 3), for evaluation.

  The result is float32 (side, side, 3) in [-1, 1].
  """
  if preprocessing.interpolation != "bilinear":
    return _pillow_view(image, preprocessing)
  return graph_view(image, preprocessing)


def graph_view(image: tf.Tensor, preprocessing: EvalPreprocessing) -> tf.Tensor:
  """Compute `eval_view` by TensorFlow operations only, for graphs to be saved.

  With antialiasing, grey levels equal Pillow's, except that a value halfway
  between two levels may be rounded to the other level.
  """
  old = tf.shape(image)[:2]
  new = tf.constant([preprocessing.image_size] * 2)
  if preprocessing.resize:
    new = _resized(old, preprocessing.resize, preprocessing.interpolation)
  if preprocessing.interpolation == "bilinear":
    image = tf.image.resize(image, new, method="bilinear")
    return scale(central_square(image, preprocessing))
  method = "bicubic"
  if preprocessing.interpolation == "bilinear_antialias":
    method = "bilinear"
  # As Pillow does, resize and round the width first, and then the height.
  for sides in (tf.stack([old[0], new[1]]), new):
    image = tf.image.resize(image, sides, method=method, antialias=True)
    image = tf.clip_by_value(tf.floor(image + 0.5), 0, 255)
  return scale(central_square(image, preprocessing))


def _resized(old: tf.Tensor, side: int, interpolation: str) -> tf.Tensor:
  """Return the new (height, width), int32, whose shorter side is `side`.

  `old` is the present (height, width). Sides are rounded as in `images.view`.
  """
  if interpolation == "bilinear":
    sides = tf.cast(old, tf.float32)
    resized = tf.round(sides * (side / tf.reduce_min(sides)))
  else:
    # Use int64, because `side * sides` may exceed the range of int32.
    sides = tf.cast(old, tf.int64)
    resized = side * sides // tf.reduce_min(sides)
  return tf.cast(_possible(old, resized, side), tf.int32)


def decode(encoded: tf.Tensor) -> tf.Tensor:
  """Decode an image file (the first frame), or an image of `raw_images`.

  The result is uint8 (height, width, 3): grey becomes RGB, 16-bit channels keep
  their upper 8 bits, alpha is dropped.
  """
  orientation, file = string_ops.split(encoded)
  return string_ops.turned(_as_stored(file), orientation)


def _as_stored(file: tf.Tensor) -> tf.Tensor:
  image = tf.case(
    [
      (_starts_with(file, jpeg.MAGIC), lambda: tf.io.decode_jpeg(file, 3)),
      (_starts_with(file, exif.PNG), lambda: tf.io.decode_png(file, 3)),
      (
        _starts_with(file, raw_images.MAGIC),
        lambda: string_ops.decode_raw(file),
      ),
    ],
    default=lambda: _decode_by_pillow(file),
  )
  return tf.ensure_shape(image, (None, None, 3))


def inception_crop(encoded: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
  """Crop a random part: 5-100 % of the area, aspect ratio 3/4 to 4/3.

  If the file is a JPEG, only the cropped part is decoded.
  """
  orientation, file = string_ops.split(encoded)

  def window_of(shape: tf.Tensor) -> tf.Tensor:
    """Choose a window of the turned image, in coordinates of the stored one."""
    shape = string_ops.turned_shape(shape, orientation)
    window = _inception_window(shape, uniforms)
    return string_ops.stored_window(window, shape, orientation)

  def decode_part() -> tf.Tensor:
    window = window_of(tf.io.extract_jpeg_shape(file))
    return tf.io.decode_and_crop_jpeg(file, window, channels=3)

  def cut_raw() -> tf.Tensor:
    window = window_of(string_ops.raw_shape(file))
    return string_ops.decode_and_crop_raw(file, window)

  def cut_part() -> tf.Tensor:
    image = _as_stored(file)
    y, x, height, width = tf.unstack(window_of(tf.shape(image)))
    return image[y : y + height, x : x + width]

  image = tf.case(
    [
      (_starts_with(file, jpeg.MAGIC), decode_part),
      (_starts_with(file, raw_images.MAGIC), cut_raw),
    ],
    default=cut_part,
  )
  image = tf.ensure_shape(image, (None, None, 3))
  return string_ops.turned(image, orientation)


def resize(image: tf.Tensor, side: int) -> tf.Tensor:
  """Resize to float32 (side, side, 3), without keeping the aspect ratio."""
  return tf.image.resize(image, (side, side), method="bilinear")


def resize_shorter(image: tf.Tensor, side: int) -> tf.Tensor:
  """Resize the shorter side to `side` pixels; keep the aspect ratio."""
  sides = _resized(tf.shape(image)[:2], side, "bilinear")
  return tf.image.resize(image, sides, method="bilinear")


def central_square(
  image: tf.Tensor, preprocessing: EvalPreprocessing
) -> tf.Tensor:
  side = preprocessing.image_size
  y, x = tf.unstack(preprocessing.begin(tf.shape(image)[:2]))
  square = image[y : y + side, x : x + side]
  return tf.ensure_shape(square, (side, side, 3))


def scale(image: tf.Tensor) -> tf.Tensor:
  """Scale [0, 255] to float32 [-1, 1], which the published weights expect."""
  return (tf.cast(image, tf.float32) - 127.5) / 127.5


def no_larger(image: tf.Tensor, side: int) -> tf.Tensor:
  """Shrink the shorter side to at most `side`, except in very long images."""
  sides = tf.shape(image)[:2]
  shorter, longer = tf.reduce_min(sides), tf.reduce_max(sides)
  too_long = tf.cast(longer, tf.float32) > LONGEST_ASPECT * tf.cast(
    shorter, tf.float32
  )

  def resized() -> tf.Tensor:
    small = resize_shorter(image, side)
    return tf.cast(tf.clip_by_value(tf.round(small), 0, 255), tf.uint8)

  return tf.cond((shorter > side) & ~too_long, resized, lambda: image)


def _starts_with(encoded: tf.Tensor, magic: bytes) -> tf.Tensor:
  return tf.strings.substr(encoded, 0, len(magic)) == magic


def _possible(shape: tf.Tensor, resized: tf.Tensor, side: int) -> tf.Tensor:
  """Check the size of an image before and after resizing; return `resized`.

  `shape` is (height, width) before resizing, and `resized` is (height, width)
  after resizing. Raise if one side of `shape` is more than `LONGEST_ASPECT`
  times the other, or if `resized` has too many pixels.
  """
  shape = tf.cast(shape, tf.float32)
  longest = tf.reduce_min(shape) * LONGEST_ASPECT
  pixels = tf.reduce_prod(tf.cast(resized, tf.float32))
  assertions = [
    tf.debugging.Assert(
      tf.reduce_max(shape) <= longest,
      [f"one side is more than {LONGEST_ASPECT:.0f} times the other"],
    ),
    tf.debugging.Assert(
      pixels <= float(MAX_RESIZED_PIXELS),
      [
        f"too long: with a shorter side of {side} pixels, the image would have "
        f"more than {MAX_RESIZED_PIXELS:,} pixels"
      ],
    ),
  ]
  # In eager mode, `Assert` checks at once, and returns None.
  with tf.control_dependencies([a for a in assertions if a is not None]):
    return tf.identity(resized)


def _decode_by_pillow(encoded: tf.Tensor) -> tf.Tensor:
  # Use Pillow: TensorFlow reads BMP images with a palette as grey, and must be
  # told whether a WebP image has an alpha channel.
  (pixels,) = python_op.call(_pillow_rgb, [encoded], [tf.uint8])
  return pixels


def _pillow_rgb(encoded: bytes) -> np.ndarray:
  return decoding.decode(encoded, ("WEBP", "BMP", "GIF"))


def _pillow_view(
  image: tf.Tensor, preprocessing: EvalPreprocessing
) -> tf.Tensor:
  """Prepare an image by `view.eval_view`, whose filters TensorFlow lacks."""

  def prepare(pixels: np.ndarray) -> np.ndarray:
    return view.eval_view(pixels, preprocessing)

  (square,) = python_op.call(prepare, [image], [tf.float32])
  side = preprocessing.image_size
  return tf.ensure_shape(square, (side, side, 3))


def _inception_window(shape: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
  """Choose a random crop of an image: (y, x, height, width), int32 (4,).

  `shape` is (height, width, 3) of the image, int32 (3,).
  """
  height, width, _ = tf.unstack(tf.cast(shape, tf.float64))
  window = random_decisions.inception_window(tf, uniforms, height, width)
  return tf.cast(tf.stack(window), tf.int32)


def _random_square(
  image: tf.Tensor, uniforms: tf.Tensor, side: int
) -> tf.Tensor:
  """Return a random square crop, (side, side, 3), of an image."""
  height, width, _ = tf.unstack(tf.cast(tf.shape(image), tf.float64))
  rows, columns = height + 1.0 - side, width + 1.0 - side
  place = random_decisions.random_place(tf, uniforms, rows, columns)
  y, x = tf.unstack(tf.cast(tf.stack(place), tf.int32))
  square = image[y : y + side, x : x + side]
  return tf.ensure_shape(square, (side, side, 3))

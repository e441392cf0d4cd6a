"""TensorFlow versions of the functions of `oriented` and `raw_images`."""

from memory_vit.data import oriented, python_op, raw_images
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.errors import DataError
from memory_vit.images import exif, jpeg

# A JPEG file without EXIF starts with a JFIF segment; tables follow at byte 20.
_JFIF, _TABLES, _TABLES_AT = b"\xff\xd8\xff\xe0\0\x10", b"\xff\xdb", 20
# Maximum side of an image in pixels, as in JPEG files.
_LONGEST_SIDE = 2**16 - 1


def marked(encoded: tf.Tensor) -> tf.Tensor:
  """Apply `oriented.mark` to a file, string ()."""
  head = tf.strings.substr(encoded, 0, _TABLES_AT + len(_TABLES))
  head = tf.strings.join([head, bytes(_TABLES_AT)])  # pad short files
  end = tf.maximum(tf.strings.length(encoded) - 2, 0)
  is_plain = (
    (tf.strings.substr(head, 0, len(_JFIF)) == _JFIF)
    & (tf.strings.substr(head, _TABLES_AT, len(_TABLES)) == _TABLES)
    & (tf.strings.substr(encoded, end, 2) == jpeg.END)
  )

  # Call Python only if the file may be truncated or may have an EXIF
  # orientation: for a small JPEG, the call takes 20 % of the time of a training
  # crop.
  def with_mark() -> tf.Tensor:
    (mark,) = python_op.call(_needed_mark, [encoded], [tf.string])
    return tf.strings.join([mark, encoded])

  return tf.ensure_shape(tf.cond(is_plain, lambda: encoded, with_mark), ())


def split(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Apply `oriented.split` to a string (); the orientation is int32 ()."""
  is_marked = (
    tf.strings.substr(encoded, 0, len(oriented.MAGIC)) == oriented.MAGIC
  )

  def parts() -> tuple[tf.Tensor, tf.Tensor]:
    number = tf.strings.substr(encoded, len(oriented.MAGIC), 1)
    number = tf.cast(tf.io.decode_raw(number, tf.uint8)[0], tf.int32)
    return number, tf.strings.substr(encoded, oriented.HEADER, -1)

  return tf.cond(is_marked, parts, lambda: (tf.constant(1), encoded))


def turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
  """Apply `exif.turned` to pixels (height, width, 3)."""

  def turn() -> tf.Tensor:
    return python_op.call(exif.turned, [image, orientation], [tf.uint8])[0]

  pixels = tf.cond(orientation == 1, lambda: image, turn)
  return tf.ensure_shape(pixels, (None, None, 3))


def turned_shape(shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
  """Return the shape (height, width, 3) that an image has after turning."""
  swapped = tf.gather(shape, (1, 0, 2))
  return tf.where(exif.swaps_axes(orientation), swapped, shape)


def stored_window(
  window: tf.Tensor, shape: tf.Tensor, orientation: tf.Tensor
) -> tf.Tensor:
  """Convert a window of the turned image to coordinates in the stored image.

  Args:
    window: y, x, height, width, int32 (4,).
    shape: shape of the turned image, int32 (3,).
    orientation: orientation of the stored image, int32 ().
  """
  begin, size = window[:2], window[2:]
  steps = tf.gather([exif.ROW_STEPS, exif.COLUMN_STEPS], orientation, axis=1)
  begin = tf.where(steps < 0, shape[:2] - begin - size, begin)
  plain = tf.concat([begin, size], axis=0)
  swapped = tf.gather(plain, (1, 0, 3, 2))
  return tf.where(exif.swaps_axes(orientation), swapped, plain)


def raw_shape(encoded: tf.Tensor) -> tf.Tensor:
  """Return the shape of an image of `raw_images`, int32 (3,)."""
  header = tf.strings.substr(
    encoded, len(raw_images.MAGIC), raw_images.SIZES.size
  )
  sizes = tf.io.decode_raw(header, tf.int32)
  # Clip, so that TensorFlow accepts the shape even if `encoded` is no image.
  sizes = tf.clip_by_value(sizes, 0, _LONGEST_SIDE)
  return tf.concat([sizes, [3]], axis=0)


def decode_raw(encoded: tf.Tensor) -> tf.Tensor:
  """Decode an image of `raw_images`, string (), to uint8 (height, width, 3)."""
  pixels = tf.strings.substr(encoded, raw_images.HEADER, -1)
  return tf.reshape(tf.io.decode_raw(pixels, tf.uint8), raw_shape(encoded))


def decode_and_crop_raw(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
  """Decode a part of an image; `window` is y, x, height, width, int32 (4,)."""
  y, x, height, width = tf.unstack(window)
  row = 3 * raw_shape(encoded)[1]
  rows = tf.strings.substr(encoded, raw_images.HEADER + y * row, height * row)
  pixels = tf.reshape(tf.io.decode_raw(rows, tf.uint8), (height, -1, 3))
  return pixels[:, x : x + width]


def _needed_mark(encoded: bytes) -> bytes:
  # Refuse a truncated file here, because libjpeg would write to stderr whenever
  # it decodes the file.
  if encoded.startswith(jpeg.MAGIC) and jpeg.is_cut(encoded):
    raise DataError("not a whole JPEG file: its end is missing")
  return oriented.mark_of(exif.orientation(encoded))

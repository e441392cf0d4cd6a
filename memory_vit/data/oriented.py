"""Files that EXIF says to turn: marked when read, turned when decoded.

Files that a person supplies are marked. Those of TFDS and tf.data are not: what
TensorFlow decodes of them is the data set.
"""

import os

from memory_vit.data import python_op
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.errors import DataError
from memory_vit.images import exif, jpeg

# Random in every process: no file can begin like this. A byte follows.
MAGIC = b"\x00EXIF" + os.urandom(11)
_HEADER = len(MAGIC) + 1
# How JPEG files begin that have no EXIF: JFIF of 16 bytes, and then tables.
_JFIF, _TABLES, _TABLES_AT = b"\xff\xd8\xff\xe0\0\x10", b"\xff\xdb", 20


def mark(encoded: bytes) -> bytes:
  """Put its orientation in front of a file, unless it is stored upright."""
  return _mark_of(exif.orientation(encoded)) + encoded


def unmarked(encoded: bytes) -> bytes:
  """The file itself."""
  return encoded[_HEADER:] if encoded.startswith(MAGIC) else encoded


def marked(encoded: tf.Tensor) -> tf.Tensor:
  """`mark` of a file, string ()."""
  head = tf.strings.substr(encoded, 0, _TABLES_AT + len(_TABLES))
  head = tf.strings.join([head, bytes(_TABLES_AT)])  # of any length
  end = tf.maximum(tf.strings.length(encoded) - 2, 0)
  is_plain = (
    (tf.strings.substr(head, 0, len(_JFIF)) == _JFIF)
    & (tf.strings.substr(head, _TABLES_AT, len(_TABLES)) == _TABLES)
    & (tf.strings.substr(encoded, end, 2) == jpeg.END)
  )

  # Python costs a fifth of what a training crop of a small JPEG does.
  def with_mark() -> tf.Tensor:
    (mark,) = python_op.call(_needed_mark, [encoded], [tf.string])
    return tf.strings.join([mark, encoded])

  return tf.ensure_shape(tf.cond(is_plain, lambda: encoded, with_mark), ())


def split(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """String () -> orientation, int32 (), and the file; 1 if it has no mark."""
  is_marked = tf.strings.substr(encoded, 0, len(MAGIC)) == MAGIC

  def parts() -> tuple[tf.Tensor, tf.Tensor]:
    number = tf.strings.substr(encoded, len(MAGIC), 1)
    number = tf.cast(tf.io.decode_raw(number, tf.uint8)[0], tf.int32)
    return number, tf.strings.substr(encoded, _HEADER, -1)

  return tf.cond(is_marked, parts, lambda: (tf.constant(1), encoded))


def turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
  """`exif.turned` of pixels (height, width, 3)."""

  def turn() -> tf.Tensor:
    return python_op.call(exif.turned, [image, orientation], [tf.uint8])[0]

  pixels = tf.cond(orientation == 1, lambda: image, turn)
  return tf.ensure_shape(pixels, (None, None, 3))


def turned_shape(shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
  """The shape of an image (height, width, 3) once it is turned."""
  swapped = tf.gather(shape, (1, 0, 2))
  return tf.where(exif.swaps_axes(orientation), swapped, shape)


def stored_window(
  window: tf.Tensor, shape: tf.Tensor, orientation: tf.Tensor
) -> tf.Tensor:
  """Where a window of the turned image lies in the stored one.

  Args:
    window: y, x, height, width, int32 (4,).
    shape: of the turned image, int32 (3,).
    orientation: int32 ().
  """
  begin, size = window[:2], window[2:]
  steps = tf.gather([exif.ROW_STEPS, exif.COLUMN_STEPS], orientation, axis=1)
  begin = tf.where(steps < 0, shape[:2] - begin - size, begin)
  plain = tf.concat([begin, size], axis=0)
  swapped = tf.gather(plain, (1, 0, 3, 2))
  return tf.where(exif.swaps_axes(orientation), swapped, plain)


def _needed_mark(encoded: bytes) -> bytes:
  # libjpeg would write to the standard error about it whenever it is decoded.
  if encoded.startswith(jpeg.MAGIC) and jpeg.is_cut(encoded):
    raise DataError("not a whole JPEG file: its end is missing")
  return _mark_of(exif.orientation(encoded))


def _mark_of(orientation: int) -> bytes:
  return MAGIC + bytes([orientation]) if orientation > 1 else b""

"""Decoded images as strings: a short header, then the pixels.

They replace encoded images if decoding is what training waits for
(`cache.what=images`). Of a crop, only its rows are copied.
"""

import os
import struct

import numpy as np

from memory_vit.data.quiet_tensorflow import tf

# Random in every process: no file can begin like this.
MAGIC = b"\x00RGB" + os.urandom(12)
_SIZES = struct.Struct("<ii")
_HEADER = len(MAGIC) + _SIZES.size
# Pixels of a side: no format has more.
_LONGEST = 2**16 - 1


def encode(image: np.ndarray) -> bytes:
  """uint8 (height, width, 3) -> string."""
  return MAGIC + _SIZES.pack(*image.shape[:2]) + image.tobytes()


def shape_of(encoded: tf.Tensor) -> tf.Tensor:
  """The shape of an image, int32 (3,)."""
  header = tf.strings.substr(encoded, len(MAGIC), _SIZES.size)
  sizes = tf.io.decode_raw(header, tf.int32)
  # Of other strings, numbers that TensorFlow takes for a shape.
  sizes = tf.clip_by_value(sizes, 0, _LONGEST)
  return tf.concat([sizes, [3]], axis=0)


def decode(encoded: tf.Tensor) -> tf.Tensor:
  """String () -> uint8 (height, width, 3)."""
  pixels = tf.strings.substr(encoded, _HEADER, -1)
  return tf.reshape(tf.io.decode_raw(pixels, tf.uint8), shape_of(encoded))


def decode_and_crop(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
  """The window y, x, height, width, int32 (4,), of an image as uint8."""
  y, x, height, width = tf.unstack(window)
  row = 3 * shape_of(encoded)[1]
  rows = tf.strings.substr(encoded, _HEADER + y * row, height * row)
  pixels = tf.reshape(tf.io.decode_raw(rows, tf.uint8), (height, -1, 3))
  return pixels[:, x : x + width]

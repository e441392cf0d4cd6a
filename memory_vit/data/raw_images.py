"""Decoded images as strings: a short header, then the pixels.

They replace encoded images if decoding is what training waits for
(`cache.what=images`). Of a crop, only its rows are copied.
"""

import os
import struct

import numpy as np

# Random in every process: no file can begin like this.
MAGIC = b"\x00RGB" + os.urandom(12)
SIZES = struct.Struct("<ii")
HEADER = len(MAGIC) + SIZES.size


def encode(image: np.ndarray) -> bytes:
  """uint8 (height, width, 3) -> string."""
  return MAGIC + SIZES.pack(*image.shape[:2]) + image.tobytes()


def decode(encoded: bytes) -> np.ndarray:
  """String -> uint8 (height, width, 3), which cannot be written to."""
  height, width = SIZES.unpack_from(encoded, len(MAGIC))
  return np.frombuffer(encoded, np.uint8, offset=HEADER).reshape(
    height, width, 3
  )

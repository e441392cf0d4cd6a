"""Store decoded images as strings: a short header, then the pixels.

With `cache.what=images`, these strings replace encoded images, so that training
does not wait for decoding. A crop copies only its own rows.
"""

import os
import struct

import numpy as np

# Start of the header. It is random, so that no image file begins with it.
MAGIC = b"\x00RGB" + os.urandom(12)
SIZES = struct.Struct("<ii")
HEADER = len(MAGIC) + SIZES.size


def encode(image: np.ndarray) -> bytes:
  """Encode pixels, uint8 (height, width, 3), as a string."""
  return MAGIC + SIZES.pack(*image.shape[:2]) + image.tobytes()


def decode(encoded: bytes) -> np.ndarray:
  """Decode a string to pixels, uint8 (height, width, 3), read-only."""
  height, width = SIZES.unpack_from(encoded, len(MAGIC))
  return np.frombuffer(encoded, np.uint8, offset=HEADER).reshape(
    height, width, 3
  )

"""Unpack untrusted Zstandard frames to a known size."""


def unpack(packed: bytes | memoryview, limit: int) -> bytes:
  """Unpack one or more frames, and take no more memory than `limit` bytes.

  Raises:
    ValueError: where they are damaged, or would be more than that.
  """
  # It stops where it is told to, unlike tensorstore, and says where a frame
  # is cut short, unlike zstandard.
  import pyarrow

  try:
    with pyarrow.CompressedInputStream(
      pyarrow.BufferReader(packed), "zstd"
    ) as stream:
      unpacked = stream.read(limit + 1)
  except OSError as error:  # so it says that the bytes are no such frame
    raise ValueError(f"zstd: {error}") from error
  if len(unpacked) > limit:
    raise ValueError(f"zstd: more than the {limit:,} bytes expected")
  return unpacked

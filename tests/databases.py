"""The database in which orbax keeps the arrays of a task, written by hand."""

import json
import struct
from collections.abc import Mapping, Sequence

import google_crc32c
import numpy as np
import pyarrow

from memory_vit.tasks import array_files, manifest, ocdbt

MAGIC = b"\x0c\xdb\x20\xde"
PLAIN, ZSTD = 0, 1

Values = dict[str, bytes]


def values_of(files: Mapping[str, bytes]) -> Values:
  """The values in the database of a task, {file: its bytes}."""
  arrays = {k.removeprefix("arrays/"): v for k, v in files.items()}
  declared = json.loads(files["task.json"])["arrays"]
  keys = []
  for name, array in declared.items():
    if 0 not in array["shape"]:
      keys += [f"{name}/.zarray", chunk_key(name, array["shape"])]
  return {k: bytes(v) for k, v in ocdbt.read(arrays, keys).items()}


def chunk_key(name: str, shape: Sequence[int]) -> str:
  return f"{name}/{'.'.join('0' for _ in shape) or '0'}"


def with_leaf(files: Mapping[str, bytes], content: bytes) -> dict[str, bytes]:
  """A task with another node, no other values, and digests that fit."""
  [node] = [name for name in files if name.startswith("arrays/d/")]
  kept = {k: v for k, v in files.items() if "/d/" not in k}
  return signed({**kept, node: content})


def signed(files: Mapping[str, bytes], **changed) -> dict[str, bytes]:
  """Makes all digests of a task fit, as whoever changed it can."""
  values = {**json.loads(files["task.json"]), **changed}
  values["files"] = {
    name.removeprefix("arrays/"): array_files.sha256(content)
    for name, content in files.items()
    if name.startswith("arrays/")
  }
  values["sha256"] = manifest.digest(values)
  return {**files, "task.json": json.dumps(values).encode()}


def number(value: int) -> bytes:
  """As protocol buffers write it."""
  out = bytearray()
  while value > 0x7F:
    out.append(value & 0x7F | 0x80)
    value >>= 7
  return bytes([*out, value])


def numbers(values: Sequence[int]) -> bytes:
  return b"".join(map(number, values))


def table(paths: Sequence[str]) -> bytes:
  """The files in which values lie."""
  encoded = [path.encode() for path in paths]
  lengths = numbers([len(path) for path in encoded])
  shared, bases = bytes(max(0, len(paths) - 1)), bytes(len(paths))
  return number(len(paths)) + shared + lengths + bases + b"".join(encoded)


def keys_of(keys: Sequence[bytes], shared: Sequence[int] = ()) -> bytes:
  """Keys, of which each may begin with what the one before begins with."""
  shared = shared or [0] * (len(keys) - 1)
  own = [key[n:] for key, n in zip(keys, [0, *shared], strict=True)]
  return (
    number(len(keys)) + numbers(shared) + numbers([len(key) for key in own])
    + b"".join(own)
  )  # fmt: skip


def keys_that_unfold(count: int, length: int) -> bytes:
  """Keys that are nearly the same: 9 bytes each, and `length` when read."""
  own = b"".join(b"%05d" % i for i in range(count))
  return (
    number(count) + numbers([length] * (count - 1))
    + numbers([length + 5] + [5] * (count - 1)) + b"a" * length + own
  )  # fmt: skip


def body(values: Mapping[str, bytes], height: int = 0) -> bytes:
  """A leaf with all values in it."""
  keys = sorted(key.encode() for key in values)
  found = [values[key.decode()] for key in keys]
  return (
    bytes([height]) + table([]) + keys_of(keys)
    + numbers([len(value) for value in found]) + bytes(len(found))
    + b"".join(found)
  )  # fmt: skip


def body_in_file(places: Mapping[str, tuple[int, int]], path: str) -> bytes:
  """A leaf of which all values lie in a file, at (offset, length)."""
  keys = sorted(places)
  return (
    b"\0" + table([path]) + keys_of([key.encode() for key in keys])
    + numbers([places[key][1] for key in keys]) + b"\1" * len(keys)
    + bytes(len(keys)) + numbers([places[key][0] for key in keys])
  )  # fmt: skip


def leaf(content: bytes, method: int = PLAIN) -> bytes:
  """The file of a node, as tensorstore itself reads it."""
  inner = packed(content) if method == ZSTD else content
  start = MAGIC + struct.pack("<Q", 18 + len(inner)) + bytes([0, method])
  check = google_crc32c.value(start + inner)
  return start + inner + struct.pack("<I", check)


def packed(content: bytes) -> bytes:
  return pyarrow.Codec("zstd").compress(content).to_pybytes()


def metadata(axes: Sequence[int], compressor=None, **changed) -> bytes:
  """As tensorstore writes it."""
  values = {
    "chunks": list(axes), "compressor": compressor,
    "dimension_separator": ".", "dtype": "<f4", "fill_value": None,
    "filters": None, "order": "C", "shape": list(axes), "zarr_format": 2,
    **changed,
  }  # fmt: skip
  return json.dumps(values, separators=(",", ":")).encode()


ZSTD_CODEC = {"id": "zstd", "level": 1}


def declared(array: np.ndarray) -> dict:
  """What task.json says of an array."""
  described = array_files.describe(array)
  return {
    "shape": list(array.shape), "dtype": described.dtype,
    "sha256": described.sha256,
  }  # fmt: skip

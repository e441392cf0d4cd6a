"""The arrays of a saved task: a directory that orbax writes.

It is not trusted. Every file is known by its SHA-256 and is read once, into
memory; arrays are made of the very bytes that were verified. Orbax and
tensorstore do not read it: they print tracebacks of their threads where
something is damaged, end the process on deeply nested metadata, and take as
much memory as a few bytes claim. What they write for a task is simple: for each
array its metadata, `NAME/.zarray`, and one chunk with all its values,
`NAME/0.0`, both in a database (`ocdbt`). So metadata is compared, byte by byte,
with that of the array that `task.json` declares, and no foreign JSON is parsed.

Chunks are not compressed. Those of earlier versions are (zstd, which gains 8 %,
but a thousandfold on a head that is still zero), within `MAX_RATIO`.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memory_vit.errors import TaskError
from memory_vit.model import trees
from memory_vit.runtime import checksums
from memory_vit.runtime.messages import brief, escaped
from memory_vit.tasks import ocdbt, zstd

# Bytes of all arrays over those of all files, as `npz.MAX_RATIO`; and what is
# always allowed, since a compressed head of zeros weighs nothing.
MAX_RATIO = 100
ALWAYS_ALLOWED_BYTES = 64 * 2**20
# As tensorstore writes it into metadata.
_ZSTD = {"id": "zstd", "level": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """The entry of an array in `task.json`; `sha256` is `trees.array_digest`."""

  shape: tuple[int, ...]
  dtype: str
  sha256: str

  @property
  def size(self) -> int:
    """The number of values."""
    return math.prod(self.shape)


def describe(array: np.ndarray) -> StoredArray:
  """The entry of an array in `task.json`."""
  return StoredArray(
    shape=array.shape, dtype=array.dtype.name, sha256=trees.array_digest(array)
  )


def write(path: Path, flat: Mapping[str, np.ndarray]) -> dict[str, str]:
  """Write arrays with orbax, which takes none without values (0 cells).

  Args:
    path: an absolute path where nothing is.
    flat: {name: array}.

  Returns:
    {file below `path`: SHA-256}.
  """
  import orbax.checkpoint as ocp  # only here: importing the core stays quick

  # This process writes alone: none waits for the others.
  me = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=me,
    active_processes={me},
    barrier_sync_key_prefix=f"process{me}",
  )
  handler = ocp.PyTreeCheckpointHandler(
    use_compression=False, multiprocessing_options=alone
  )
  with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
    filled = {k: v for k, v in flat.items() if v.size}
    checkpointer.save(path, args=ocp.args.PyTreeSave(filled))
  # It names the directory of whoever saved, and nothing reads it.
  (path / "commit_success.txt").unlink(missing_ok=True)
  return {
    file.relative_to(path).as_posix(): checksums.file_digest(file)
    for file in sorted(path.rglob("*"))
    if file.is_file()
  }


def sha256(content: bytes) -> str:
  """The digest of a file's content, as hexadecimal."""
  return hashlib.sha256(content).hexdigest()


def read(
  path: Path, files: Mapping[str, str], stored: Mapping[str, StoredArray]
) -> dict[str, np.ndarray]:
  """Read arrays, and verify them.

  Args:
    path: the directory.
    files: {file in it: SHA-256}.
    stored: what the arrays must be; float32, of a size that memory can hold.

  Raises:
    TaskError: where a file is missing, a link or damaged, or an array is other
      than `stored` says, or not finite.
  """
  claimed = sum(4 * array.size for array in stored.values())
  # More than orbax ever needs for such arrays.
  contents = _read_files(path, files, 2**24 + 2 * claimed)
  try:
    _require_weight(claimed, sum(map(len, contents.values())))
    arrays = _unpack(contents, stored)
  except ValueError as error:
    raise TaskError(f"arrays in {path} cannot be read: {error}.") from error
  require_as_stored(arrays, stored, f"arrays in {path}")
  return arrays


def require_as_stored(
  arrays: Mapping[str, np.ndarray],
  stored: Mapping[str, StoredArray],
  where: str,
) -> None:
  """Raise `TaskError` for arrays that are others, or are not finite."""
  damaged = [
    name
    for name, array in arrays.items()
    if trees.array_digest(array) != stored[name].sha256
  ]
  if damaged:
    raise TaskError(
      f"{where} are damaged: {brief(sorted(damaged))} are not what task.json "
      "says (SHA-256)."
    )
  require_finite(arrays, where)


def require_finite(arrays: Mapping[str, np.ndarray], where: str) -> None:
  """Raise `TaskError` for values that are infinite or not a number."""
  broken = [k for k, v in arrays.items() if not np.isfinite(v).all()]
  if broken:
    raise TaskError(
      f"{where}: {brief(sorted(broken))} have values that are not finite."
    )


def read_file(
  path: Path, limit: int | None, at_most: int | None = None
) -> bytes:
  """Read a regular file, which is no link.

  Args:
    path: of the file.
    limit: bytes that it may have; None for any number.
    at_most: bytes that are read, of a longer file the first ones.

  Raises:
    OSError: where it cannot be read.
    TaskError: where it is something else, or longer.
  """
  # Without O_NONBLOCK, opening a pipe waits for somebody to write into it.
  flags = os.O_NOFOLLOW | os.O_NONBLOCK
  with open(path, "rb", opener=lambda p, f: os.open(p, f | flags)) as file:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
      raise TaskError(f"{path} is no regular file.")
    if limit is not None and found.st_size > limit:
      raise TaskError(f"{path} has more than the {limit:,} bytes expected.")
    # Not without a number: it may grow. Not `limit`: as much would be reserved.
    size = found.st_size if at_most is None else min(found.st_size, at_most)
    return file.read(size)


def require_entries(path: Path, files: Iterable[str]) -> None:
  """Raise `TaskError` unless exactly `files` lie below the directory `path`."""
  files = set(files)
  folders = {
    parent.as_posix() for name in files for parent in Path(name).parents
  }
  try:
    found = set(_walk(path, "", folders))
  except OSError as error:
    raise TaskError(f"{path} cannot be read: {error}") from error
  foreign, missing = sorted(found - files), sorted(files - found)
  if foreign or missing:
    raise TaskError(
      f"{path} is damaged: missing files {brief(missing)}, unknown files "
      f"{brief(foreign)} ({len(missing)} and {len(foreign)} in all)."
    )


def _walk(path: Path, inner: str, folders: set[str]) -> Iterator[str]:
  """Yield all files below a directory; of foreign directories just the name."""
  with os.scandir(path / inner) as entries:
    for entry in entries:
      name = f"{inner}/{entry.name}" if inner else entry.name
      if entry.is_symlink():
        raise TaskError(f"{path}/{escaped(name)} is a link: a task has none.")
      if entry.is_dir() and name in folders:
        yield from _walk(path, name, folders)
      else:
        yield name


def _read_files(
  path: Path, files: Mapping[str, str], limit: int
) -> dict[str, bytes]:
  """Read all files, `limit` bytes together, and compare their digests."""
  contents = {}
  for name, expected in files.items():
    try:
      content = read_file(path / name, limit)
    except OSError as error:
      raise TaskError(f"{path / name} cannot be read: {error}") from error
    if sha256(content) != expected:
      raise TaskError(
        f"{path / name} is damaged: it is not what task.json says (SHA-256)."
      )
    limit -= len(content)
    contents[name] = content
  return contents


def _unpack(
  contents: Mapping[str, bytes], stored: Mapping[str, StoredArray]
) -> dict[str, np.ndarray]:
  """Make the arrays of the files of orbax, or raise ValueError."""
  keys = {
    name: (f"{name}/.zarray", f"{name}/{_chunk(array)}")
    for name, array in stored.items()
    if array.size
  }
  values = {}
  if keys:
    values = ocdbt.read(contents, itertools.chain(*keys.values()))
  return {
    name: _array(name, stored[name], *(values[key] for key in keys[name]))
    if name in keys
    else np.zeros(stored[name].shape, stored[name].dtype)
    for name in stored
  }


def _require_weight(claimed: int, there: int) -> None:
  """Raise ValueError where arrays are much larger than their files."""
  if claimed > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * there):
    raise ValueError(
      f"they would be {claimed:,} bytes, from {there:,}: expected at most "
      f"{MAX_RATIO} times as many"
    )


def _chunk(array: StoredArray) -> str:
  """The key of the first chunk of an array."""
  return ".".join("0" for _ in array.shape) or "0"


def _metadata(array: StoredArray, compressor: Mapping[str, Any] | None) -> str:
  """The metadata that tensorstore writes of an array that is one chunk."""
  values = {
    "chunks": array.shape,
    "compressor": compressor,
    "dimension_separator": ".",
    "dtype": np.dtype(array.dtype).newbyteorder("<").str,
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": array.shape,
    "zarr_format": 2,
  }
  return json.dumps(values, separators=(",", ":"))


def _array(
  name: str, expected: StoredArray, metadata: memoryview, chunk: memoryview
) -> np.ndarray:
  """Make an array of its two values; raise ValueError if it is another."""
  size = 4 * expected.size
  data: bytes | memoryview = chunk
  plain, packed = (_metadata(expected, codec) for codec in (None, _ZSTD))
  if metadata == packed.encode():
    data = zstd.unpack(chunk, size)
  elif metadata != plain.encode():
    found = bytes(metadata[: len(packed)])
    raise ValueError(f"{name} is described by {brief(found)}, expected {plain}")
  if len(data) != size:
    raise ValueError(f"{name} has {len(data):,} bytes, expected {size:,}")
  array = np.frombuffer(data, np.dtype(expected.dtype).newbyteorder("<"))
  # It begins anywhere in its file.
  return np.require(array.reshape(expected.shape), requirements=["ALIGNED"])

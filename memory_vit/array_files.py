"""The arrays of a saved task: a directory that orbax writes.

It is read with distrust. Every file is known by its SHA-256, and is read once,
into memory; what the arrays are unpacked from there are the bytes that were
verified. Orbax itself would read what lies on disk, prints tracebacks of its
threads where that is damaged, and takes as much memory as a chunk claims. So
tensorstore, in which orbax stores, unpacks them without it.
"""

import dataclasses
import hashlib
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memory_vit import trees
from memory_vit.errors import TaskError

# Of foreign names in one message.
_MAX_NAMES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """What `task.json` says of an array.

  Attributes:
    shape: as saved.
    dtype: numpy's name of it.
    sha256: `trees.array_digest`.
  """

  shape: tuple[int, ...]
  dtype: str
  sha256: str

  @property
  def size(self) -> int:
    """The number of values."""
    return math.prod(self.shape)


def describe(array: np.ndarray) -> StoredArray:
  """What `task.json` shall say of an array."""
  return StoredArray(
    shape=array.shape, dtype=array.dtype.name, sha256=trees.array_digest(array)
  )


def write(path: Path, flat: Mapping[str, np.ndarray]) -> dict[str, str]:
  """Writes arrays with orbax, which takes none without values (0 cells).

  Args:
    path: an absolute path where nothing is.
    flat: the arrays by name.

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
  with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
    checkpointer.save(path, {k: v for k, v in flat.items() if v.size})
  # It names the directory of whoever saved, and nothing reads it.
  (path / "commit_success.txt").unlink(missing_ok=True)
  return {
    file.relative_to(path).as_posix(): _file_sha256(file)
    for file in sorted(path.rglob("*"))
    if file.is_file()
  }


def sha256(content: bytes) -> str:
  """The digest of a file's content, as hexadecimal."""
  return hashlib.sha256(content).hexdigest()


def _file_sha256(file: Path) -> str:
  with file.open("rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def read(
  path: Path, files: Mapping[str, str], stored: Mapping[str, StoredArray]
) -> dict[str, np.ndarray]:
  """Reads arrays, and verifies them.

  Args:
    path: the directory.
    files: those in it: {file: SHA-256}.
    stored: what the arrays must be; float32, of a size that memory can hold.

  Returns:
    The arrays by name.

  Raises:
    TaskError: where a file is missing, a link or damaged, or an array is other
      than `stored` says, or not finite.
  """
  contents = _read_files(path, files, _most_bytes(stored))
  arrays = _unpack(path, contents, stored)
  damaged = [
    name
    for name, array in arrays.items()
    if trees.array_digest(array) != stored[name].sha256
  ]
  if damaged:
    raise TaskError(
      f"arrays in {path} are damaged: {sorted(damaged)} are not what task.json "
      "says (SHA-256)."
    )
  require_finite(arrays, f"arrays in {path}")
  return arrays


def require_finite(arrays: Mapping[str, np.ndarray], where: str) -> None:
  """Raises `TaskError` for infinities and what is not a number."""
  broken = [k for k, v in arrays.items() if not np.isfinite(v).all()]
  if broken:
    raise TaskError(
      f"{where}: {sorted(broken)} have values that are not finite."
    )


def read_file(path: Path, limit: int) -> bytes:
  """Reads a regular file of at most `limit` bytes, which is no link.

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
    if found.st_size > limit:
      raise TaskError(f"{path} has more than the {limit:,} bytes expected.")
    # Not without a number: it may grow. Not `limit`: as much would be reserved.
    return file.read(found.st_size)


def require_entries(path: Path, files: Iterable[str]) -> None:
  """Raises `TaskError` unless exactly these files lie below a directory.

  Args:
    path: the directory.
    files: relative paths.
  """
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
      f"{path} is damaged: missing files {missing[:_MAX_NAMES]}, unknown files "
      f"{foreign[:_MAX_NAMES]} ({len(missing)} and {len(foreign)} in all)."
    )


def _walk(path: Path, inner: str, folders: set[str]) -> Iterator[str]:
  """All that lies below a directory; of foreign directories just the name."""
  with os.scandir(path / inner) as entries:
    for entry in entries:
      name = f"{inner}/{entry.name}" if inner else entry.name
      if entry.is_symlink():
        raise TaskError(f"{path / name} is a link: a task has none.")
      if entry.is_dir() and name in folders:
        yield from _walk(path, name, folders)
      else:
        yield name


def _most_bytes(stored: Mapping[str, StoredArray]) -> int:
  """More than orbax ever needs for such arrays."""
  return 2**24 + 2 * sum(4 * array.size for array in stored.values())


def _read_files(
  path: Path, files: Mapping[str, str], limit: int
) -> dict[str, bytes]:
  """Reads all files, `limit` bytes together, and compares their digests."""
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
  path: Path,
  contents: Mapping[str, bytes],
  stored: Mapping[str, StoredArray],
) -> dict[str, np.ndarray]:
  """Unpacks the files of orbax: names, shapes and types are as in `stored`."""
  try:
    return _unpack_from_memory(contents, stored)
  except TaskError as error:
    raise TaskError(f"arrays in {path} cannot be read: {error}") from error
  # Digests do not keep out who writes them anew: then tensorstore raises many
  # types, with messages of several lines.
  except Exception as error:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    raise TaskError(f"arrays in {path} cannot be read: {line}") from error


def _unpack_from_memory(
  contents: Mapping[str, bytes], stored: Mapping[str, StoredArray]
) -> dict[str, np.ndarray]:
  import tensorstore as ts  # orbax brings it

  context = ts.Context()  # two readers must not see each other's files
  memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
  for name, content in contents.items():
    memory.write(name, content).result()
  database = {"driver": "ocdbt", "base": {"driver": "memory"}}
  arrays = {}
  for name, expected in stored.items():
    if not expected.size:
      arrays[name] = np.zeros(expected.shape, expected.dtype)
      continue
    spec = {"driver": "zarr", "kvstore": database, "path": name}
    array = ts.open(spec, context=context, open=True, read=True).result()
    _require_layout(name, array, expected)
    arrays[name] = array.read().result()
  return arrays


def _require_layout(name: str, array: Any, expected: StoredArray) -> None:
  """Raises unless a tensorstore array is what it must be; reads no values."""
  found = (array.shape, array.dtype.name)
  if found != (expected.shape, expected.dtype):
    raise TaskError(
      f"{name} is {found}, expected {(expected.shape, expected.dtype)}."
    )
  # A chunk is unpacked as a whole, and may claim any size.
  if math.prod(array.chunk_layout.read_chunk.shape) > expected.size:
    raise TaskError(f"a chunk of {name} is larger than the array.")

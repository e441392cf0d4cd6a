"""Read and write the .safetensors files of saved tasks.

In a task's directory, the file holds the arrays, beside `task.json`. A task in
a single file has the text of `task.json` in the metadata of the header. Files
are untrusted: every array must have the name, shape, type and SHA-256 that
`task.json` states, and a file larger than these arrays is refused.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from memory_vit.errors import TaskError
from memory_vit.model import trees
from memory_vit.runtime import files, paths
from memory_vit.runtime.messages import brief, escaped, first_line

FILE = "arrays.safetensors"
SUFFIX = ".safetensors"
# In a single-file task, the metadata of the header has the text of `task.json`
# under this key. Other programs may add other keys.
KEY = "memory_vit.task"
_LENGTH_BYTES = 8
# Maximum size of a header in bytes, not counting its metadata. The names and
# shapes of the arrays need less.
MAX_HEADER_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """Entry of an array in `task.json`; `sha256` is from `trees.array_digest`."""

  shape: tuple[int, ...]
  dtype: str
  sha256: str

  @property
  def size(self) -> int:
    return math.prod(self.shape)


def describe(array: np.ndarray) -> StoredArray:
  return StoredArray(
    shape=array.shape, dtype=array.dtype.name, sha256=trees.array_digest(array)
  )


def to_bytes(
  flat: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> bytes:
  whole = {name: np.ascontiguousarray(array) for name, array in flat.items()}
  return safetensors.numpy.save(whole, dict(metadata) if metadata else None)


def read(
  path: Path, stored: Mapping[str, StoredArray], more_header: int = 0
) -> dict[str, np.ndarray]:
  """Read and verify float32 arrays; raise `TaskError` if the file is a link."""
  # `more_header` is the maximum size of the metadata in the header, in bytes.
  claimed = sum(4 * array.size for array in stored.values())
  try:
    content = read_file(path, claimed + MAX_HEADER_BYTES + more_header)
    entries = dict(safetensors.deserialize(content))
    del content  # free the memory: `entries` has copies of the arrays
  except (OSError, safetensors.SafetensorError) as error:
    raise TaskError(f"{path} cannot be read: {first_line(error)}") from error
  _require_described(entries, stored, path)
  arrays = {
    name: np.frombuffer(entries[name]["data"], "<f4").reshape(array.shape)
    for name, array in stored.items()
  }
  _require_digests(arrays, stored, path)
  require_finite(arrays, str(path))
  return arrays


def _require_described(
  entries: Mapping[str, Mapping[str, Any]],
  stored: Mapping[str, StoredArray],
  path: Path,
) -> None:
  """Raise `TaskError` unless `entries` are float32 and agree with `stored`."""
  problems = [
    f"{name} is {brief((entry['dtype'], entry['shape']))}"
    for name, entry in sorted(entries.items())
    if name not in stored
    or (entry["dtype"], tuple(entry["shape"])) != ("F32", stored[name].shape)
  ]
  problems += [f"{name} is missing" for name in sorted(stored.keys() - entries)]
  if problems:
    raise TaskError(
      f"{path} is damaged: its arrays do not match task.json: "
      f"{brief(problems)}."
    )


def _require_digests(
  arrays: Mapping[str, np.ndarray],
  stored: Mapping[str, StoredArray],
  path: Path,
) -> None:
  """Raise `TaskError` if the SHA-256 of an array differs from `stored`."""
  damaged = [
    name
    for name, array in arrays.items()
    if trees.array_digest(array) != stored[name].sha256
  ]
  if damaged:
    raise TaskError(
      f"{path} is damaged: the arrays {brief(sorted(damaged))} do not match "
      "their SHA-256 in task.json."
    )


def require_finite(arrays: Mapping[str, np.ndarray], where: str) -> None:
  """Raise `TaskError` if any value is infinite or NaN."""
  broken = [k for k, v in arrays.items() if not np.isfinite(v).all()]
  if broken:
    raise TaskError(
      f"{where}: the arrays {brief(sorted(broken))} have values that are not "
      "finite."
    )


def read_file(
  path: Path, limit: int | None, at_most: int | None = None
) -> bytes:
  """Read all of a regular file, or its first `at_most` bytes; refuse a link."""
  with files.open_sized(path) as (file, size):
    if size is None:
      raise TaskError(f"{path} is not a regular file.")
    if limit is not None and size > limit:
      raise TaskError(f"{path} has {size:,} bytes, expected at most {limit:,}.")
    # Read at most `size` bytes, because the file may grow meanwhile. Never
    # call `read(limit)`: it would allocate a buffer of `limit` bytes.
    return file.read(size if at_most is None else min(size, at_most))


def require_entries(path: Path, files: Iterable[str]) -> None:
  """Raise `TaskError` unless the directory `path` holds exactly `files`."""
  expected = set(files)
  try:
    names = set(_names(path))
  except OSError as error:
    raise TaskError(f"{path} cannot be read: {error}") from error
  foreign, missing = sorted(names - expected), sorted(expected - names)
  if foreign or missing:
    raise TaskError(
      f"{path} is damaged: missing files {brief(missing)}, unknown files "
      f"{brief(foreign)} ({len(missing)} missing, {len(foreign)} unknown)."
    )


def _names(path: Path) -> Iterator[str]:
  """Yield the names of entries in `path`; raise `TaskError` for any link."""
  for entry in path.iterdir():
    if entry.is_symlink():
      raise TaskError(
        f"{path}/{escaped(entry.name)} is a link: a task must not have links."
      )
    yield entry.name


def is_single_file(path: Path) -> bool:
  """Return whether a path names a single-file task rather than a directory."""
  return path.suffix == SUFFIX and not path.is_dir()


def write_single_file(
  path: Path, flat: Mapping[str, np.ndarray], text: str
) -> None:
  """Write a single-file task; replace an older file as a whole."""
  content = to_bytes(flat, {KEY: text})
  with files.writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as part:
      part.write_bytes(content)


def read_task_text(path: Path, limit: int) -> str:
  """Read the text of `task.json` from the header of a single-file task."""
  # Follow links, because the cache of the Hugging Face hub consists of links.
  file = paths.followed(path)
  begins = read_file(file, None, at_most=_LENGTH_BYTES)
  length = int.from_bytes(begins, "little")
  # The header has `task.json` as a JSON string: escapes may double its length.
  most = 2 * limit + MAX_HEADER_BYTES
  if len(begins) < _LENGTH_BYTES or length > most:
    raise TaskError(
      f"{path} is not a task: its first bytes say that its header has "
      f"{brief(length)} bytes. Expected a .safetensors file whose header has "
      f"at most {most:,} bytes."
    )
  whole = read_file(file, None, at_most=_LENGTH_BYTES + length)
  try:
    text = json.loads(whole[_LENGTH_BYTES:])["__metadata__"][KEY]
  except (ValueError, KeyError, TypeError, RecursionError):
    text = None
  if not isinstance(text, str) or len(text.encode(errors="replace")) > limit:
    raise TaskError(
      f"{path} is not a task: {KEY!r} is missing from the metadata of its "
      f"header, or has more than {limit:,} bytes. Expected a file that "
      'save_task(..., format="safetensors") wrote.'
    )
  return text

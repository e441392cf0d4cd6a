"""A task in one `.safetensors` file, for people who hand tasks to each other.

Its tensors are the arrays of the task, under their names. What `task.json` says
stands in the metadata of its header. It is trusted as little as a directory:
every array is verified by its SHA-256, and nothing is read that is larger than
what the task declares.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from memory_vit.errors import TaskError
from memory_vit.runtime import files
from memory_vit.runtime.messages import brief, first_line
from memory_vit.tasks import array_files
from memory_vit.tasks.array_files import StoredArray

SUFFIX = ".safetensors"
# Of the metadata, beside what other programs may note there.
_KEY = "memory_vit.task"
_LENGTH_BYTES = 8
# Escapes double a text; names and shapes of all arrays take less than this.
_MORE_HEADER_BYTES = 2**20


def is_one(path: Path) -> bool:
  """Whether a path names such a file, rather than a task's directory."""
  return path.suffix == SUFFIX and not path.is_dir()


def write(path: Path, flat: Mapping[str, np.ndarray], text: str) -> None:
  """Write a task; an older file is replaced once the new one is complete.

  Args:
    path: of the file; its directory is there.
    flat: {name: array}, float32.
    text: what `task.json` would hold.
  """
  content = safetensors.numpy.save(
    {name: np.ascontiguousarray(array) for name, array in flat.items()},
    {_KEY: text},
  )
  with files.replacing(path) as part:
    part.write_bytes(content)


def read_text(path: Path, limit: int) -> str:
  """Read what `task.json` would hold, of at most `limit` bytes.

  A file that is given may be a link, as those in the cache of a hub are.

  Raises:
    OSError: where the file cannot be read.
    TaskError: where it is no task.
  """
  file = path.resolve()
  begins = array_files.read_file(file, None, at_most=_LENGTH_BYTES)
  length = int.from_bytes(begins, "little")
  most = 2 * limit + _MORE_HEADER_BYTES
  if len(begins) < _LENGTH_BYTES or length > most:
    raise TaskError(
      f"{path} is not a task: a header of {brief(length)} bytes, expected a "
      f".safetensors file with at most {most:,}."
    )
  whole = array_files.read_file(file, None, at_most=_LENGTH_BYTES + length)
  try:
    text = json.loads(whole[_LENGTH_BYTES:])["__metadata__"][_KEY]
  except (ValueError, KeyError, TypeError, RecursionError):
    text = None
  if not isinstance(text, str) or len(text.encode(errors="replace")) > limit:
    raise TaskError(
      f"{path} is not a task: the metadata of its header has no "
      f"{_KEY!r} of at most {limit:,} bytes. Expected what "
      'save_task(..., format="safetensors") wrote.'
    )
  return text


def read(
  path: Path, stored: Mapping[str, StoredArray]
) -> dict[str, np.ndarray]:
  """Read the arrays of a task, and verify them.

  Args:
    path: of the file, whose text was found to describe `stored`.
    stored: what the arrays must be.

  Raises:
    TaskError: where they are anything else.
  """
  claimed = sum(4 * array.size for array in stored.values())
  limit = claimed + 2**24 + _MORE_HEADER_BYTES
  try:
    content = array_files.read_file(path.resolve(), limit)
    found = dict(safetensors.deserialize(content))
  except (OSError, safetensors.SafetensorError) as error:
    raise TaskError(f"{path} cannot be read: {first_line(error)}") from error
  problems = [
    f"{name} is {brief((entry['dtype'], entry['shape']))}"
    for name, entry in sorted(found.items())
    if name not in stored
    or (entry["dtype"], tuple(entry["shape"])) != ("F32", stored[name].shape)
  ]
  problems += [f"{name} is missing" for name in sorted(stored.keys() - found)]
  if problems:
    raise TaskError(
      f"{path} is damaged: its arrays are not those of the task: "
      f"{brief(problems)}."
    )
  arrays = {
    name: np.frombuffer(found[name]["data"], "<f4").reshape(array.shape)
    for name, array in stored.items()
  }
  array_files.require_as_stored(arrays, stored, str(path))
  return arrays

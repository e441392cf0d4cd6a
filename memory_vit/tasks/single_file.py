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

from memory_vit.errors import TaskError
from memory_vit.runtime import files
from memory_vit.runtime.messages import brief
from memory_vit.tasks import array_files

SUFFIX = ".safetensors"
# Of the metadata, beside what other programs may note there.
_KEY = "memory_vit.task"
_LENGTH_BYTES = 8


def is_one(path: Path) -> bool:
  """Whether a path names such a file, rather than a task's directory."""
  return path.suffix == SUFFIX and not path.is_dir()


def write(path: Path, flat: Mapping[str, np.ndarray], text: str) -> None:
  """Write a task; an older file is replaced once the new one is complete.

  Args:
    path: of the file.
    flat: {name: array}, float32.
    text: what `task.json` would hold.

  Raises:
    TrainingError: if it cannot be written.
  """
  content = array_files.to_bytes(flat, {_KEY: text})
  with files.writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
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
  # Escapes double a text.
  most = 2 * limit + array_files.MAX_HEADER_BYTES
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

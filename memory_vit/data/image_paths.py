"""Build a split of image files on this disk, each with its label.

File names need not be UTF-8. Only regular files are opened.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epy

from memory_vit.data.data_files import DataFiles
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.kinds import KINDS
from memory_vit.runtime.messages import utf8

with epy.lazy_imports():
  from memory_vit.data import (
    graph_source,
    python_op,
    quiet_tensorflow,
    string_ops,
  )

if TYPE_CHECKING:
  import tensorflow as tf


def split_of(
  ref: SplitRef,
  root: pathlib.Path,
  labelled: Sequence[tuple[str, Any]],
  *,
  class_names: Sequence[str],
  irregular: Mapping[str, str],
  facts: Mapping[str, Any] | None = None,
  skipped: Sequence[str] = (),
) -> Split:
  """Return a split of `labelled`: (path below `root`, encoded label), in order.

  `irregular` is {path: why the image cannot be read}.
  """
  where = {file: os.path.join(root, file) for file, _ in labelled}
  # An irregular file (such as a pipe) gets the path b"", because reading the
  # file could block.
  names = [
    b"" if file in irregular else os.fsencode(where[file])
    for file, _ in labelled
  ]
  # The import of TensorFlow is slow, so errors in paths are raised before it.
  tf = quiet_tensorflow.tf
  paths = tf.constant(names)
  dtype = KINDS[ref.kind].target_type
  numbers = np.array([label for _, label in labelled], dtype)
  labels = tf.constant(numbers)
  read = _reader(names)
  split = Split(
    name=ref.name,
    split=ref.split,
    size=len(labelled),
    class_names=tuple(class_names),
    kind=ref.kind,
    source=graph_source.GraphSource(
      lambda i: (
        string_ops.marked(read(tf.gather(paths, i))),
        tf.gather(labels, i),
      )
    ),
    file_name=lambda i: utf8(where[labelled[i][0]]),
    broken={
      i: irregular[file]
      for i, (file, _) in enumerate(labelled)
      if file in irregular
    },
    data_files=DataFiles(facts=facts or {}, files=where),
    labels=numbers,
    skipped=tuple(filter(None, skipped)),
  )
  split.check_labels(numbers)
  return split


def shuffled(labelled: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
  """Shuffle (path, label) pairs, so that every slice mixes the classes.

  Pairs are sorted by a hash of the path: the order is the same on all machines,
  and adding an image does not reorder the other images.
  """
  return sorted(
    labelled, key=lambda pair: hashlib.sha256(os.fsencode(pair[0])).digest()
  )


def why_irregular(path: str) -> str:
  return f"not a regular file, but {_kind(path)}"


def _kind(path: str) -> str:
  try:
    mode = os.stat(path).st_mode
  except OSError as error:
    return f"a link whose target cannot be found ({error.strerror})"
  kinds = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
  }
  return kinds.get(stat.S_IFMT(mode), "unknown")


def _reader(names: Sequence[bytes]) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return a function that reads the file at a path.

  The path and the file's content are string tensors of shape ().
  """
  try:
    b"".join(names).decode("utf-8")
  except UnicodeDecodeError:
    return _read_in_python
  return quiet_tensorflow.tf.io.read_file


def _read_in_python(path: tf.Tensor) -> tf.Tensor:
  """Read a file in Python: TensorFlow's errors cannot name non-UTF-8 paths."""

  def read(path: bytes) -> bytes:
    with open(path, "rb") as file:
      return file.read()

  tf = quiet_tensorflow.tf
  (content,) = python_op.call(read, [path], [tf.string])
  return tf.ensure_shape(content, ())

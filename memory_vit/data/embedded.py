"""Splits of embeddings: rows that `memory-vit embed` wrote, in place of images.

Only heads and probes can be trained on them. Each output of `embed` is a split:
`config.data.dir` holds the outputs train/ and perhaps test/, or is itself an
output, which is then the split "train".
"""

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epy

from memory_vit.data import embeddings, labels, split_parts
from memory_vit.data.data_files import LISTED, DataFiles
from memory_vit.data.embeddings import EmbeddedRows, EmbeddingFiles
from memory_vit.data.labels import Encoder
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.kinds import KINDS
from memory_vit.kinds.written import Label
from memory_vit.runtime import messages, parquet
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.paths import local

with epy.lazy_imports():  # TensorFlow is imported only after all checks
  from memory_vit.data import graph_source

if TYPE_CHECKING:
  import tensorflow as tf

logger = logging.getLogger(__name__)

# Name of the split that defines the classes. If `config.data.dir` is a single
# output of `embed`, not a folder of outputs, its only split has this name.
_TRAIN = "train"
# Maximum number of images without an embedding that `_left_out` lists.
_NAMED = 100
# Key in `DataFiles.facts` for digests that identify the runs of `embed`.
_RUNS = "runs of embed"


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class _Output:
  """Output of `embed`, with a row for each of n images.

  Attributes:
    name: name of the split.
    files: files of the output.
    table: columns "path", "label" and "error" of all rows.
    good: bool (n,), whether a row has an embedding.
  """

  name: str
  files: EmbeddingFiles
  table: pa.Table
  good: np.ndarray


# (output of `embed`, indices of the chosen rows of that output, int64 (k,)).
# The order of the indices mixes the classes.
_Part = tuple[_Output, np.ndarray]


def open_embeddings(ref: SplitRef) -> Split:
  """Open a split of embeddings, without reading their values into memory."""
  root = local(ref.dir or ".", "the embeddings", DataError)
  paths = _find_outputs(root, ref.dir)
  wanted = split_parts.split_names(ref.split)
  _require_splits([_TRAIN, *wanted], paths, ref)
  outputs = {
    name: _open(name, paths[name]) for name in dict.fromkeys([_TRAIN, *wanted])
  }
  class_names = _class_names(outputs[_TRAIN], ref.kind)
  sizes = {name: len(outputs[name].table) for name in wanted}
  parts = split_parts.split_parts(ref.name, ref.split, sizes)
  orders = {name: _mixed(outputs[name]) for name in wanted}
  # Slice all rows, including rows without an embedding. Then "train[:90%]" of
  # embeddings covers the same images as "train[:90%]" of an image folder.
  sliced = [(outputs[name], orders[name][part]) for name, part in parts]
  return _split(ref, root, sliced, class_names)


def _split(
  ref: SplitRef,
  root: Path,
  sliced: Sequence[_Part],
  class_names: Sequence[str],
) -> Split:
  """Build a split of the rows in `sliced` that have an embedding."""
  parts = [(output, rows[output.good[rows]]) for output, rows in sliced]
  left_out = _left_out(ref, sliced)
  numbers = np.concatenate([
    _labels(output, class_names, ref.kind)[rows] for output, rows in parts
  ])  # fmt: skip
  if not len(numbers):
    raise BrokenDataError(
      f"data set {ref.name!r}, split {ref.split!r}, has no embedding: none of "
      "its images could be read."
    )
  chosen = _column("path", parts)
  split = Split(
    name=ref.name,
    split=ref.split,
    size=len(numbers),
    class_names=tuple(class_names),
    kind=ref.kind,
    source=graph_source.GraphSource(_no_image),
    file_name=lambda index: chosen[int(index)].as_py(),
    data_files=_data_files(root, parts, chosen, numbers),
    labels=numbers,
    embedded=EmbeddedRows.of([(output.files, rows) for output, rows in parts]),
    left_out=left_out,
  )
  split.check_labels(numbers)
  return split


def _column(name: str, parts: Sequence[_Part]) -> pa.ChunkedArray:
  chunks = [
    chunk
    for output, rows in parts
    for chunk in output.table[name].take(rows).chunks
  ]
  return pa.chunked_array(chunks, pa.string())


def _find_outputs(root: Path, directory: str) -> dict[str, Path]:
  """Return {split: path of an output of `embed`} for the outputs in `root`.

  Errors name `directory`, which is `config.data.dir`.
  """
  if not directory or not root.is_dir():
    raise DataError(
      f"the directory of embeddings {messages.brief(directory)} is not there: "
      "set config.data.dir to the --output of `memory-vit embed`, or to a "
      "directory that holds one such output per split, such as train and test."
    )
  if any(root.glob(parquet.SHARDS)):
    return {_TRAIN: root}
  return {
    path.name: path
    for path in sorted(root.iterdir())
    if not path.name.startswith((".", "_")) and any(path.glob(parquet.SHARDS))
  }


def _require_splits(
  wanted: Sequence[str], paths: Mapping[str, Path], ref: SplitRef
) -> None:
  for name in wanted:
    if name not in paths:
      known = messages.name_list([messages.brief(name) for name in paths])
      raise DataError(
        f"data set {ref.name!r} has no split {messages.brief(name)}: "
        f"{messages.brief(ref.dir)} holds no embeddings of that name. The "
        f"directory has {known or 'no embeddings at all'}."
      )


def _open(name: str, path: Path) -> _Output:
  files = embeddings.open_files(path)
  table = files.table()
  good = table["error"].is_null()
  where = escaped(str(path))
  rows = table.filter(good)
  if not len(rows):
    raise BrokenDataError(f"{where} has no row with an embedding.")
  unlabelled = rows.filter(rows["label"].is_null())["path"]
  if len(unlabelled):
    raise BrokenDataError(
      f"{where}: {len(unlabelled):,} of {len(rows):,} rows have no label, "
      f"such as the row of {escaped(unlabelled[0].as_py())}. Expected a label "
      "in each row: run embed on folders of classes "
      "(--input=FOLDER_OF_CLASSES), or on Parquet files with a --label_column."
    )
  return _Output(name, files, table, good.to_numpy())


def _mixed(output: _Output) -> np.ndarray:
  """Return the indices of all rows, int64 (n,), in an order that mixes classes.

  Rows are sorted by a hash of their path, as are the images of a folder or a
  list. Of each path, the hash covers the part below the deepest folder that
  holds all images. So the order stays the same if this folder is moved, or if
  another backbone is used.
  """
  paths = output.table["path"]
  ends = pc.min_max(paths).as_py()
  common = os.path.commonprefix([ends["min"], ends["max"]])
  start = common.rfind("/") + 1
  keys = [
    hashlib.sha256(os.fsencode(f"{output.name}/{path[start:]}")).digest()
    for path in paths.to_pylist()
  ]
  return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _class_names(train: _Output, kind: str) -> Sequence[str]:
  names = labels.names_among(_written(train, kind))
  labels.tell_of_numbers(names, f"embeddings, split {train.name!r}")
  return names


def _written(output: _Output, kind: str) -> list[Label]:
  """Return the parsed labels (or values) of the rows with an embedding."""
  rows = output.table.filter(pa.array(output.good))
  read = functools.cache(KINDS[kind].read)
  try:
    return [read(text) for text in rows["label"].to_pylist()]
  except DataError as error:
    raise BrokenDataError(
      f"the embeddings of {output.name!r} do not fit the kind of the task: "
      f"{error} (config.task.kind is {kind!r})."
    ) from None


def _labels(
  output: _Output, class_names: Sequence[str], kind: str
) -> np.ndarray:
  """Return the labels of all rows, encoded as in `Split.labels`.

  The label of a row without an embedding is -1.
  """
  encode = Encoder(kind, class_names, numbers_are_names=True)
  encoded = np.full(len(output.good), -1, encode.dtype)
  place = f"the embeddings of {output.name!r} differ from those of {_TRAIN!r}"
  encoded[output.good] = encode.all(_written(output, kind), lambda _: place)
  return encoded


def _data_files(
  root: Path,
  parts: Sequence[_Part],
  paths: pa.ChunkedArray,
  numbers: np.ndarray,
) -> DataFiles:
  """Return the files of a split.

  `DataFiles.facts` holds a digest of the examples, and digests that identify
  the runs of `embed`.
  """
  digest = hashlib.sha256(numbers.tobytes())
  for path in paths.to_pylist():
    digest.update(os.fsencode(f"{path}\n"))
  plans = [output.files.plan for output, _ in parts]
  return DataFiles(
    # Record the runs of `embed`, because a new run can change the values in a
    # file without changing the size of the file.
    facts={LISTED: digest.hexdigest(), _RUNS: [*dict.fromkeys(plans)]},
    files={
      os.path.relpath(path, root): str(path)
      for output, _ in parts
      for path in output.files.paths
    },
  )


def _left_out(ref: SplitRef, sliced: Sequence[_Part]) -> tuple[str, ...]:
  """Return a line for each image without an embedding.

  After `_NAMED` such lines, a last line counts the remaining images.
  """
  bad = [(output, rows[~output.good[rows]]) for output, rows in sliced]
  count = sum(len(rows) for _, rows in bad)
  if not count:
    return ()
  logger.warning(
    "embeddings, split %r: %d of %d rows are left out because their images "
    "could not be read", ref.split, count, sum(len(rows) for _, rows in sliced),
  )  # fmt: skip
  prefix = f"embeddings of {ref.split!r}"
  paths, errors = (
    _column(name, bad).slice(0, _NAMED).to_pylist()
    for name in ("path", "error")
  )
  lines = [
    f"{prefix}: {path} has no embedding: {error}"
    for path, error in zip(paths, errors, strict=True)
  ]
  if count > _NAMED:
    lines.append(f"{prefix}: {count - _NAMED:,} more have no embedding")
  return tuple(lines)


def _no_image(index: "tf.Tensor") -> "tuple[tf.Tensor, tf.Tensor]":
  raise DataError(f"example {index} is an embedding, and has no image.")

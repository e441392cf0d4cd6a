"""Splits of embeddings: rows that `memory_vit.embed` wrote, in place of images.

Heads and probes alone can be trained on them. An output of `embed` is a split,
as a folder of an image folder is: `dir` holds train/ (or train.parquet), and
perhaps test/, or is itself the output that all splits are slices of.
"""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memory_vit.data import sources
from memory_vit.data.inventory import LISTED, Inventory
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.sources import Source
from memory_vit.data.split_ref import SplitRef
from memory_vit.embeddings import embedding_files
from memory_vit.embeddings.embedded_rows import EmbeddedRows
from memory_vit.embeddings.embedding_files import EmbeddingFiles
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime import messages
from memory_vit.runtime.messages import escaped
from memory_vit.runtime.paths import local

logger = logging.getLogger(__name__)

# The split that an output is which stands alone; its labels are the classes.
_TRAIN = "train"
_SUFFIX = ".parquet"
# Rows without an embedding that a result names.
_NAMED = 100
# The fact that tells runs of `embed` from others.
_RUNS = "runs of embed"


@dataclasses.dataclass(frozen=True, eq=False)  # it holds a table
class _Output:
  """An output of `embed`, without its values.

  Attributes:
    name: of the split.
    files: of its rows.
    table: "path", "label" and "error" of every row.
    rows: int64 (k,), those with an embedding, in an order that mixes classes.
  """

  name: str
  files: EmbeddingFiles
  table: pa.Table
  rows: np.ndarray


def open_embeddings(ref: SplitRef) -> Source:
  """Open a split of embeddings; their values stay in their files.

  Raises:
    DataError: where there is no such directory or split, and for embeddings
      that are damaged, or were made in different ways.
    BrokenDataError: for rows without a label, or with one that train lacks.
  """
  root = local(ref.dir or ".", "the embeddings", DataError)
  paths = _find_outputs(root, ref.dir)
  wanted = sources.split_names(ref.split)
  _require_splits([_TRAIN, *wanted], paths, ref)
  outputs = {
    name: _open(name, paths[name]) for name in dict.fromkeys([_TRAIN, *wanted])
  }
  class_names = _class_names(outputs[_TRAIN])
  sizes = {name: len(outputs[name].rows) for name in wanted}
  parts = [
    (outputs[name], outputs[name].rows[part])
    for name, part in sources.split_parts(ref.name, ref.split, sizes)
  ]
  return _source(ref, root, parts, class_names)


def _source(
  ref: SplitRef,
  root: Path,
  parts: Sequence[tuple[_Output, np.ndarray]],
  class_names: Sequence[str],
) -> Source:
  """The source of some rows of some outputs, in their order."""
  labels = np.concatenate([
    _labels(output, class_names)[rows] for output, rows in parts
  ])  # fmt: skip
  chosen = pa.chunked_array(
    [
      chunk
      for output, rows in parts
      for chunk in output.table["path"].take(rows).chunks
    ],
    pa.string(),
  )
  return Source(
    name=ref.name,
    split=ref.split,
    size=len(labels),
    class_names=tuple(class_names),
    fetch=_no_image,
    file_name=lambda index: chosen[int(index)].as_py(),
    inventory=_inventory(root, parts, chosen, labels),
    labels=labels,
    embedded=_rows(parts),
    left_out=tuple(
      line
      for output in {output.name: output for output, _ in parts}.values()
      for line in _left_out(output)
    ),
  )


def _find_outputs(root: Path, directory: str) -> dict[str, Path]:
  """{split: output of `embed`} in a directory, which messages call so."""
  if directory and root.suffix == _SUFFIX and root.is_file():
    return {_TRAIN: root}
  if not directory or not root.is_dir():
    raise DataError(
      f"the embeddings {messages.brief(directory)} are not there: set "
      "config.data.dir to the --output of memory_vit.embed, or to a directory "
      "that holds one for each split, train and test."
    )
  if any(root.glob(embedding_files.SHARDS)):
    return {_TRAIN: root}
  found: dict[str, Path] = {}
  for path in sorted(root.iterdir()):
    if not _is_output(path):
      continue
    if other := found.get(path.stem):
      raise DataError(
        f"{messages.brief(directory)} holds {messages.brief(other.name)} and "
        f"{messages.brief(path.name)}, expected one of them: move the one that "
        "is not to be used."
      )
    found[path.stem] = path
  return found


def _is_output(path: Path) -> bool:
  """Whether something in a directory is a split."""
  if path.name.startswith((".", "_")):
    return False
  if path.suffix == _SUFFIX and path.is_file():
    return True
  # Shards of a file that is not whole yet are no split.
  return not path.suffix and any(path.glob(embedding_files.SHARDS))


def _require_splits(
  wanted: Sequence[str], paths: Mapping[str, Path], ref: SplitRef
) -> None:
  for name in wanted:
    if name not in paths:
      known = messages.name_list([messages.brief(name) for name in paths])
      raise DataError(
        f"data set {ref.name!r} has no split {messages.brief(name)}: "
        f"{messages.brief(ref.dir)} holds no embeddings of that name, and has "
        f"{known or 'none at all'}."
      )


def _open(name: str, path: Path) -> _Output:
  """Open an output, and count the rows that have no embedding."""
  files = embedding_files.open_files(path)
  table = files.table()
  good = table["error"].is_null()
  rows = np.flatnonzero(good.to_numpy())
  where = escaped(str(path))
  if not len(rows):
    raise BrokenDataError(f"{where} has no row that is an embedding.")
  if len(rows) < len(table):
    logger.warning(
      "%s: %d of %d rows are left out, whose images could not be read",
      where, len(table) - len(rows), len(table),
    )  # fmt: skip
  found = table.filter(good)
  unlabelled = found.filter(found["label"].is_null())["path"]
  if len(unlabelled):
    raise BrokenDataError(
      f"{where}: {len(unlabelled):,} of {len(rows):,} rows have no label, such "
      f"as {escaped(unlabelled[0].as_py())}: expected embeddings of folders of "
      "classes (embed --input=FOLDER_OF_CLASSES), or of Parquet files with a "
      "--label_column."
    )
  order = _mixed(name, found["path"])
  return _Output(name, files, table, rows[order])


def _mixed(name: str, paths: pa.ChunkedArray) -> np.ndarray:
  """The order of a split, so that a slice is fair to all classes: int64 (k,).

  By the hash of a path below the folder that all lie in, as the images of a
  folder or a list are: embeddings of DATA/train are in the order of DATA/train
  itself, and stay so where the folder is moved, or embedded by other backbones.
  """
  ends = pc.min_max(paths).as_py()
  common = os.path.commonprefix([ends["min"], ends["max"]])
  start = common.rfind("/") + 1
  keys = [
    hashlib.sha256(os.fsencode(f"{name}/{path[start:]}")).digest()
    for path in paths.to_pylist()
  ]
  return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _class_names(train: _Output) -> list[str]:
  """The labels of the training output, sorted as folders of classes are."""
  return sorted(pc.unique(train.table["label"].take(train.rows)).to_pylist())


def _labels(output: _Output, class_names: Sequence[str]) -> np.ndarray:
  """The class of every row, int32 (n,); -1 of those without an embedding."""
  known = pa.array(class_names, pa.string())
  places = pc.fill_null(pc.index_in(output.table["label"], known), -1)
  labels = places.to_numpy().astype(np.int32)
  unknown = output.rows[labels[output.rows] < 0]
  if len(unknown):
    names = pc.unique(output.table["label"].take(np.sort(unknown)))
    raise BrokenDataError(
      f"the embeddings of {output.name!r} have classes that those of "
      f"{_TRAIN!r} do not have: "
      f"{messages.name_list([messages.brief(n) for n in names.to_pylist()])}."
    )
  return labels


def _rows(parts: Sequence[tuple[_Output, np.ndarray]]) -> EmbeddedRows:
  """Where the examples are, counted over the files of all parts."""
  files = embedding_files.joined([output.files for output, _ in parts])
  starts = np.cumsum([0, *(output.files.size for output, _ in parts)])
  rows = [
    part + start for (_, part), start in zip(parts, starts[:-1], strict=True)
  ]
  return EmbeddedRows(files, np.concatenate(rows))


def _inventory(
  root: Path,
  parts: Sequence[tuple[_Output, np.ndarray]],
  paths: pa.ChunkedArray,
  labels: np.ndarray,
) -> Inventory:
  """The files of a split, with what made them, and a digest of its examples."""
  digest = hashlib.sha256(labels.tobytes())
  for path in paths.to_pylist():
    digest.update(os.fsencode(f"{path}\n"))
  plans = [plan for output, _ in parts for plan in output.files.plans]
  return Inventory(
    # Files of other values may have the same sizes.
    facts={LISTED: digest.hexdigest(), _RUNS: [*dict.fromkeys(plans)]},
    files={
      path.name if path == root else os.path.relpath(path, root): str(path)
      for output, _ in parts
      for path in output.files.paths
    },
  )


def _left_out(output: _Output) -> list[str]:
  """Name the rows without an embedding; of many, the first ones."""
  bad = output.table.filter(pc.is_valid(output.table["error"]))
  lines = [
    f"embeddings of {output.name!r}: {row['path']} has none: {row['error']}"
    for row in bad.slice(0, _NAMED).to_pylist()
  ]
  if len(bad) > _NAMED:
    lines.append(
      f"embeddings of {output.name!r}: {len(bad) - _NAMED:,} more have none"
    )
  return lines


def _no_image(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """`Source.fetch` where there is nothing to fetch."""
  raise DataError(f"example {index} is an embedding, and has no image.")

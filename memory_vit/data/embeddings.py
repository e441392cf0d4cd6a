"""Read the embeddings that `memory-vit embed` wrote: a directory of shards."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from memory_vit.data import labels
from memory_vit.errors import BackboneError, DataError
from memory_vit.kinds.written import name_of
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BackboneId, EvalPreprocessing
from memory_vit.runtime import parquet, schema
from memory_vit.runtime.messages import brief, escaped

_TYPES = ("float32", "bfloat16")
# Maximum number of values that are stored per image, far more than the largest
# ViT produces. The limit bounds the memory that corrupt metadata can request.
_MOST_VALUES = 2**24
# Columns of every file, besides the columns that hold embeddings.
_COLUMNS = ("path", "label", "error")
# Number of rows that are decoded at once.
_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Origin:
  """Origin of embeddings: backbone and preprocessing.

  Attributes:
    backbone: the backbone that computed them.
    preprocessing: how images were prepared.
    dtype: dtype of the computation.
    stored: dtype of the values in the files.
    shapes: {"pooled": (d,), "layers": (n, d)}, as in `Embeddings`.
  """

  backbone: BackboneId
  preprocessing: EvalPreprocessing
  dtype: str
  stored: str
  shapes: Mapping[str, tuple[int, ...]]

  @property
  def kind(self) -> np.dtype:
    return np.dtype(jnp.dtype(self.stored))

  def width(self, name: str) -> int:
    """Return the size in bytes of an image's values in the column `name`."""
    return math.prod(self.shapes[name]) * self.kind.itemsize


@dataclasses.dataclass(frozen=True)
class EmbeddingFiles:
  """Files of a run of `embed`; rows are numbered consecutively over files.

  Attributes:
    paths: paths of the files.
    counts: number of rows of each file.
    origin: origin of all rows.
    plan: a digest that differs between runs of `embed`.
  """

  paths: tuple[Path, ...]
  counts: tuple[int, ...]
  origin: Origin
  plan: str

  def table(self) -> pa.Table:
    """Read the columns "path", "label" and "error" of every row."""
    tables = []
    for path in self.paths:
      with parquet.reading(path) as file:
        table = file.read(columns=[*_COLUMNS])
        table.validate(full=True)  # refuse text that is not UTF-8
        if table["path"].null_count:
          raise DataError(f"{_shown(path)} has rows without a path.")
        tables.append(table.replace_schema_metadata())
    return pa.concat_tables(tables)


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class EmbeddedRows:
  """Examples of a split that are rows of Parquet files, in the split's order.

  Attributes:
    files: (path, number of rows) of each file; files are not held in memory.
    origin: origin of all rows.
    rows: int64 (k,), row number of each example, consecutive over all files.
  """

  files: tuple[tuple[Path, int], ...]
  origin: Origin
  rows: np.ndarray

  @classmethod
  def of(
    cls, parts: Sequence[tuple[EmbeddingFiles, np.ndarray]]
  ) -> EmbeddedRows:
    """Join `parts`, (output of `embed`, row numbers), of a common origin."""
    first, start = parts[0][0], 0
    files: list[tuple[Path, int]] = []
    rows = []
    for output, numbers in parts:
      if output.origin != first.origin:
        raise DataError(
          f"{_shown(first.paths[0])} and {_shown(output.paths[0])} were made "
          f"in different ways: {brief(first.origin)} and "
          f"{brief(output.origin)}. Embed all images in the same way."
        )
      files += zip(output.paths, output.counts, strict=True)
      rows.append(numbers + start)
      start += sum(output.counts)
    return cls(tuple(files), first.origin, np.concatenate(rows))

  def take(self, indices: np.ndarray) -> EmbeddedRows:
    """Return the rows of the examples `indices`, int64 (n,)."""
    return dataclasses.replace(self, rows=self.rows[indices])

  def values(self, name: str) -> Iterator[np.ndarray]:
    """Yield the array in column `name` of each row; `rows` must be sorted."""
    begin = 0
    for path, count in self.files:
      first, last = np.searchsorted(self.rows, [begin, begin + count])
      if first < last:
        yield from self._values_of(path, name, self.rows[first:last] - begin)
      begin += count

  def _values_of(
    self, path: Path, name: str, rows: np.ndarray
  ) -> Iterator[np.ndarray]:
    begin = 0
    with parquet.reading(path) as file:
      for batch in file.iter_batches(_AT_ONCE, columns=[name]):
        end = begin + batch.num_rows
        first, last = np.searchsorted(rows, [begin, end])
        if first < last:
          column = batch.column(0).take(pa.array(rows[first:last] - begin))
          yield from self._array(column, path, name)
        begin = end

  def _array(self, column: pa.Array, path: Path, name: str) -> np.ndarray:
    """Convert a column of k byte strings to an array (k, ...)."""
    if column.null_count:
      raise DataError(
        f"{_shown(path)}: {column.null_count} rows have no {name!r}, although "
        "their images could be read: embed the images again."
      )
    shape = (len(column), *self.origin.shapes[name])
    values = np.frombuffer(
      column.buffers()[1], self.origin.kind, math.prod(shape)
    )
    return values.reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)  # == is ambiguous for arrays
class Embeddings:
  """Embeddings of images, in their order; unreadable images are left out.

  Attributes:
    paths: paths of the k images.
    labels: class of each image; None if the class is unknown.
    pooled: the input of a head.
    layers: the input of a probe: the class token (if the ViT has one) and the
      mean patch token of each block, standardized.
    backbone: the backbone that computed the embeddings.
    preprocessing: how images were prepared.
    dtype: dtype of the computation.
  """

  paths: tuple[str, ...]
  labels: tuple[str | None, ...]
  pooled: Float32[np.ndarray, "k d"]
  layers: Float32[np.ndarray, "k n d"]
  backbone: BackboneId
  preprocessing: EvalPreprocessing
  dtype: str

  def require_backbone(self, backbone: Backbone) -> None:
    """Raise `BackboneError` if another backbone computed the embeddings."""
    if backbone.id != self.backbone:
      raise BackboneError(
        f"the embeddings were made by the backbone {self.backbone}, not by "
        f"{backbone.id}: load the backbone that made the embeddings."
      )

  def class_names(self) -> tuple[str, ...]:
    """Return the labels that occur, in the order of classes in training."""
    return labels.in_order(
      name_of(label) for label in self.labels if label is not None
    )


def read_embeddings(path: str | os.PathLike[str]) -> Embeddings:
  """Read an output of `embed`: a directory of shards.

  Args:
    path: the --output of `embed`.

  Raises:
    DataError: if `path` does not exist, holds no embeddings, or lacks shards.
  """
  files = open_files(Path(path))
  table, origin = files.table(), files.origin
  good = table["error"].is_null().to_numpy()
  embedded = EmbeddedRows.of([(files, np.flatnonzero(good))])
  arrays = {}
  for name in ("pooled", "layers"):
    arrays[name] = np.empty((good.sum(), *origin.shapes[name]), np.float32)
    for row, values in zip(arrays[name], embedded.values(name), strict=True):
      row[...] = values
  table = table.filter(good)
  return Embeddings(
    paths=tuple(table["path"].to_pylist()),
    labels=tuple(table["label"].to_pylist()),
    **arrays,
    backbone=origin.backbone,
    preprocessing=origin.preprocessing,
    dtype=origin.dtype,
  )


def open_files(path: Path) -> EmbeddingFiles:
  """Open a directory of shards; only the footers of the files are read."""
  files = sorted(path.glob(parquet.SHARDS))
  names = [file.name for file in files]
  if not names or names != [
    parquet.shard_name(i, len(names)) for i in range(len(names))
  ]:
    raise DataError(
      f"{_shown(path)} has the shards {brief(names)}: expected all shards of a "
      "run of `embed`. Repeat the `embed` command to finish the run."
    )
  counts, origins, plans = [], [], []
  for file in files:
    with parquet.reading(file) as opened:
      counts.append(opened.metadata.num_rows)
      origin, plan = _described(file, opened.schema_arrow)
    origins.append(origin)
    plans.append(plan)
  different = set(plans)
  if len(different) > 1 or any(origin != origins[0] for origin in origins):
    raise DataError(
      f"{_shown(path)} holds shards of {max(2, len(different))} runs: expected "
      "the shards of one run of `embed`."
    )
  return EmbeddingFiles(tuple(files), tuple(counts), origins[0], plans[0])


def _described(path: Path, file_schema: pa.Schema) -> tuple[Origin, str]:
  """Return (origin of the embeddings, digest of the run of `embed`)."""
  try:
    about = parquet.described(file_schema)
    if about["rows"] != "embeddings":
      raise ValueError("the rows are not embeddings")
    shapes = {
      str(name): tuple(shape)
      for name, shape in about["values"]["shapes"].items()
    }
    dtype, stored = about["dtype"], about["values"]["dtype"]
    known = dtype in _TYPES and stored in _TYPES
    if not known or not all(map(_is_shape, shapes.values())):
      raise ValueError("unsupported dtype or shape of the values")
    parts = about["backbone"], about["preprocessing"], str(about["plan"])
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise DataError(
      f"{_shown(path)} holds no embeddings: expected a file that embed wrote."
    ) from error
  where = f"{_shown(path)}: metadata"
  origin = Origin(
    schema.build(BackboneId, parts[0], where, DataError),
    schema.build(EvalPreprocessing, parts[1], where, DataError),
    dtype,
    stored,
    shapes,
  )
  _require_columns(path, file_schema, origin)
  return origin, parts[2]


def _is_shape(shape: tuple[Any, ...]) -> bool:
  whole = all(type(side) is int and side > 0 for side in shape)
  return bool(shape) and whole and math.prod(shape) <= _MOST_VALUES


def _require_columns(path: Path, columns: pa.Schema, origin: Origin) -> None:
  """Raise if a column is missing, or its type is not that in the metadata."""
  expected = dict.fromkeys(_COLUMNS, pa.string())
  for name in origin.shapes:
    expected[name] = pa.binary(origin.width(name))
  for name, kind in expected.items():
    index = columns.get_field_index(name)
    column_type = columns.field(index).type if index >= 0 else "missing"
    if column_type != kind:
      raise DataError(
        f"{_shown(path)}: the column {brief(name)} is "
        f"{brief(str(column_type))}, expected {kind} as in the file's metadata."
      )


def _shown(path: Path) -> str:
  return escaped(str(path))

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
# Of an image: far more than the largest ViT has, and little enough to be held.
_MOST_VALUES = 2**24
# The columns of every file, beside the values.
_COLUMNS = ("path", "label", "error")
# Rows that are decoded together.
_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Origin:
  """Origin of embeddings: backbone and preprocessing.

  Attributes:
    backbone: that made them.
    preprocessing: how images were prepared.
    dtype: of the computation.
    stored: the type of the values in the files.
    shapes: {"pooled": (d,), the input of a head; "layers": (n, d), the input
      of a probe: of each block the class token, if there is one, and the mean
      patch, standardized}.
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
    """Bytes of the values of an image in the column `name`."""
    return math.prod(self.shapes[name]) * self.kind.itemsize


@dataclasses.dataclass(frozen=True)
class EmbeddingFiles:
  """The files of a run of `embed`, whose rows follow each other.

  Attributes:
    paths: of the files.
    counts: the number of rows of each.
    origin: of all rows.
    plan: a digest that differs between runs of `embed`.
  """

  paths: tuple[Path, ...]
  counts: tuple[int, ...]
  origin: Origin
  plan: str

  def table(self) -> pa.Table:
    """The columns "path", "label" and "error" of every row."""
    tables = []
    for path in self.paths:
      with parquet.reading(path) as file:
        found = file.read(columns=[*_COLUMNS])
        found.validate(full=True)  # text may be no UTF-8
        if found["path"].null_count:
          raise DataError(f"{_shown(path)} has rows without a path.")
        tables.append(found.replace_schema_metadata())
    return pa.concat_tables(tables)


@dataclasses.dataclass(frozen=True, eq=False)  # it holds an array
class EmbeddedRows:
  """The rows of files that are the examples of a split, in its order.

  Attributes:
    files: (path, number of rows) of each; nothing of them is in memory.
    origin: how all of them were made.
    rows: int64 (k,), of every example, counted over the files.
  """

  files: tuple[tuple[Path, int], ...]
  origin: Origin
  rows: np.ndarray

  @classmethod
  def of(
    cls, parts: Sequence[tuple[EmbeddingFiles, np.ndarray]]
  ) -> EmbeddedRows:
    """Rows, int64 (k,), of outputs of `embed`, all made in the same way."""
    first, start = parts[0][0], 0
    files: list[tuple[Path, int]] = []
    rows = []
    for output, numbers in parts:
      if output.origin != first.origin:
        raise DataError(
          f"{_shown(first.paths[0])} and {_shown(output.paths[0])} were made "
          f"in different ways: {brief(first.origin)} and "
          f"{brief(output.origin)}."
        )
      files += zip(output.paths, output.counts, strict=True)
      rows.append(numbers + start)
      start += sum(output.counts)
    return cls(tuple(files), first.origin, np.concatenate(rows))

  def take(self, indices: np.ndarray) -> EmbeddedRows:
    """The rows of some examples, int64 (n,)."""
    return dataclasses.replace(self, rows=self.rows[indices])

  def values(self, name: str) -> Iterator[np.ndarray]:
    """Yield the stored values, (...), of rows in the order of the files."""
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
          found = batch.column(0).take(pa.array(rows[first:last] - begin))
          yield from self._array(found, path, name)
        begin = end

  def _array(self, column: pa.Array, path: Path, name: str) -> np.ndarray:
    """A column of bytes as an array (k, ...)."""
    if column.null_count:
      raise DataError(
        f"{_shown(path)}: {column.null_count} rows have no {name!r}, though "
        "their images could be read: embed them again."
      )
    shape = (len(column), *self.origin.shapes[name])
    values = np.frombuffer(
      column.buffers()[1], self.origin.kind, math.prod(shape)
    )
    return values.reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Embeddings:
  """Embeddings of images, in their order; unreadable images are left out.

  Attributes:
    paths: of the images, k.
    labels: their classes; None if the input named none.
    pooled: the input of a head.
    layers: the input of a probe: of each block the class token, if there is
      one, and the mean patch, standardized.
    backbone: that made them.
    preprocessing: how images were prepared.
    dtype: of the computation.
  """

  paths: tuple[str, ...]
  labels: tuple[str | None, ...]
  pooled: Float32[np.ndarray, "k d"]
  layers: Float32[np.ndarray, "k n d"]
  backbone: BackboneId
  preprocessing: EvalPreprocessing
  dtype: str

  def require_backbone(self, backbone: Backbone) -> None:
    """Raise `BackboneError` if another backbone made them."""
    if backbone.id != self.backbone:
      raise BackboneError(
        f"the embeddings are of the backbone {self.backbone}, and this is "
        f"{backbone.id}: load the one that made them."
      )

  def class_names(self) -> tuple[str, ...]:
    """The labels that occur, in the order that they have in training."""
    return labels.in_order(
      name_of(label) for label in self.labels if label is not None
    )


def read_embeddings(path: str | os.PathLike[str]) -> Embeddings:
  """Read what `embed` wrote: a directory of shards.

  Args:
    path: its --output.

  Raises:
    DataError: if it does not exist, is something else, or lacks shards.
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
      f"{_shown(path)} has the shards {brief(names)}: expected all of a run of "
      "embed. Give the same command again to finish it."
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
      f"{_shown(path)} holds shards of {max(2, len(different))} runs."
    )
  return EmbeddingFiles(tuple(files), tuple(counts), origins[0], plans[0])


def _described(path: Path, found: pa.Schema) -> tuple[Origin, str]:
  """How the rows of a file were made, and the plan of the run."""
  try:
    about = parquet.described(found)
    if about["rows"] != "embeddings":
      raise ValueError("it has other rows")
    shapes = {
      str(name): tuple(shape)
      for name, shape in about["values"]["shapes"].items()
    }
    dtype, stored = about["dtype"], about["values"]["dtype"]
    known = dtype in _TYPES and stored in _TYPES
    if not known or not all(map(_is_shape, shapes.values())):
      raise ValueError("its values are of another kind")
    parts = about["backbone"], about["preprocessing"], str(about["plan"])
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise DataError(
      f"{_shown(path)} holds no embeddings: expected what embed wrote."
    ) from error
  where = f"{_shown(path)}: metadata"
  origin = Origin(
    schema.build(BackboneId, parts[0], where, DataError),
    schema.build(EvalPreprocessing, parts[1], where, DataError),
    dtype,
    stored,
    shapes,
  )
  _require_columns(path, found, origin)
  return origin, parts[2]


def _is_shape(shape: tuple[Any, ...]) -> bool:
  whole = all(type(side) is int and side > 0 for side in shape)
  return bool(shape) and whole and math.prod(shape) <= _MOST_VALUES


def _require_columns(path: Path, found: pa.Schema, origin: Origin) -> None:
  """Refuse a file whose columns differ from its metadata."""
  expected = dict.fromkeys(_COLUMNS, pa.string())
  for name in origin.shapes:
    expected[name] = pa.binary(origin.width(name))
  for name, kind in expected.items():
    index = found.get_field_index(name)
    column_type = found.field(index).type if index >= 0 else "missing"
    if column_type != kind:
      raise DataError(
        f"{_shown(path)}: the column {brief(name)} is "
        f"{brief(str(column_type))}, expected {kind}, as its metadata says."
      )


def _shown(path: Path) -> str:
  return escaped(str(path))

"""The Parquet files of embeddings: found, checked, and read row by row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from memory_vit.errors import DataError
from memory_vit.model.task import BackboneId, EvalPreprocessing
from memory_vit.runtime import parquet, schema
from memory_vit.runtime.messages import brief, escaped

_TYPES = ("float32", "bfloat16")
# Of an image: far more than the largest ViT has, and little enough to be held.
_MOST_VALUES = 2**24
# Rows that are decoded together.
_AT_ONCE = 1024
# What is known of every image.
_COLUMNS = ("path", "label", "error")


@dataclasses.dataclass(frozen=True)
class Origin:
  """How embeddings were made.

  Attributes:
    backbone: that made them.
    evaluation: how images were prepared.
    dtype: of the computation.
    stored: the type of the values in the files.
    shapes: {"pooled": (d,), what a head reads; "layers": (n, d), what a probe
      reads: of each block the class token, where there is one, and the mean
      patch, standardized}.
  """

  backbone: BackboneId
  evaluation: EvalPreprocessing
  dtype: str
  stored: str
  shapes: Mapping[str, tuple[int, ...]]

  @property
  def kind(self) -> np.dtype:
    """`stored` as a type of NumPy."""
    return np.dtype(jnp.dtype(self.stored))

  def width(self, name: str) -> int:
    """Bytes of the values of an image in the column `name`."""
    return math.prod(self.shapes[name]) * self.kind.itemsize


@dataclasses.dataclass(frozen=True)
class EmbeddingFiles:
  """Files of embeddings, whose rows follow each other.

  Attributes:
    paths: of the files.
    counts: their rows.
    origin: of all rows.
    plans: what tells these runs of `embed` from others.
  """

  paths: tuple[Path, ...]
  counts: tuple[int, ...]
  origin: Origin
  plans: tuple[str, ...]

  @property
  def size(self) -> int:
    """The number of rows."""
    return sum(self.counts)

  def table(self) -> pa.Table:
    """What is known of every row but its values: "path", "label", "error".

    Raises:
      DataError: where a file is damaged.
    """
    tables = []
    for path in self.paths:
      with parquet.reading(path) as file:
        found = file.read(columns=[*_COLUMNS])
        found.validate(full=True)  # text may be no UTF-8
        if found["path"].null_count:
          raise DataError(f"{_shown(path)} has rows without a path.")
        tables.append(found.replace_schema_metadata())
    return pa.concat_tables(tables)

  def values(self, name: str, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Read the values of some rows, a part of a file at a time.

    Args:
      name: of the column, "pooled" or "layers".
      rows: int64 (k,), ascending.

    Yields:
      Arrays (some, ...) as they are stored, k rows in all.

    Raises:
      DataError: where a file is damaged, or a row has no values.
    """
    ends = np.cumsum(self.counts)
    parts = np.split(rows, np.searchsorted(rows, ends[:-1]))
    for path, part, end, count in zip(
      self.paths, parts, ends, self.counts, strict=True
    ):
      if len(part):
        yield from _values(path, name, part - (end - count), self.origin)


def joined(parts: Sequence[EmbeddingFiles]) -> EmbeddingFiles:
  """The rows of several outputs of `embed`, one after the other.

  Raises:
    DataError: where they were made in different ways.
  """
  first, *others = parts
  for other in others:
    if other.origin != first.origin:
      raise DataError(
        f"{_shown(first.paths[0])} and {_shown(other.paths[0])} were made in "
        f"different ways: {brief(first.origin)} and {brief(other.origin)}."
      )
  return EmbeddingFiles(
    tuple(path for part in parts for path in part.paths),
    tuple(count for part in parts for count in part.counts),
    first.origin,
    tuple(plan for part in parts for plan in part.plans),
  )


def open_files(path: Path) -> EmbeddingFiles:
  """Open what `embed` wrote, a directory of shards.

  The footers of the files are read, and nothing else.

  Raises:
    DataError: where it is not there, is something else, or shards are missing.
  """
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
  return EmbeddingFiles(
    tuple(files), tuple(counts), origins[0], tuple(different)
  )


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
  """Refuse a file whose columns are not those that its metadata says."""
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


def _values(
  path: Path, name: str, rows: np.ndarray, origin: Origin
) -> Iterator[np.ndarray]:
  """`EmbeddingFiles.values` of one file; row groups without any are skipped."""
  with parquet.reading(path) as file:
    begin = 0
    for group in range(file.num_row_groups):
      end = begin + file.metadata.row_group(group).num_rows
      if len(_within(rows, begin, end)):
        for batch in file.iter_batches(
          _AT_ONCE, row_groups=[group], columns=[name]
        ):
          batch_rows = _within(rows, begin, begin + batch.num_rows)
          yield _array(batch.column(0), batch_rows - begin, name, origin, path)
          begin += batch.num_rows
      begin = end


def _within(rows: np.ndarray, begin: int, end: int) -> np.ndarray:
  """Those of some ascending rows that lie in an interval."""
  first, last = np.searchsorted(rows, [begin, end])
  return rows[first:last]


def _array(
  column: pa.Array, rows: np.ndarray, name: str, origin: Origin, path: Path
) -> np.ndarray:
  """Some rows of a column of bytes as an array (k, ...)."""
  shape, width = origin.shapes[name], origin.width(name)
  if column.null_count:
    empty = column.is_null().to_numpy(zero_copy_only=False)[rows]
    if empty.any():
      raise DataError(
        f"{_shown(path)}: {int(empty.sum())} rows have no {name!r}, though "
        "their images could be read: embed them anew."
      )
  if not len(rows):  # there may be no buffer at all
    return np.empty((0, *shape), origin.kind)
  raw = np.frombuffer(
    column.buffers()[1], np.uint8, len(column) * width, column.offset * width
  )
  found = raw.reshape(len(column), width)[rows]
  return found.view(origin.kind).reshape(len(rows), *shape)


def _shown(path: Path) -> str:
  """A path for messages."""
  return escaped(str(path))

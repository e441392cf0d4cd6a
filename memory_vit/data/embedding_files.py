"""The Parquet files of embeddings: found and checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
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
  """The files of a run of `embed`, whose rows follow each other.

  Attributes:
    paths: of the files.
    counts: their rows.
    origin: of all rows.
    plan: what tells this run of `embed` from others.
  """

  paths: tuple[Path, ...]
  counts: tuple[int, ...]
  origin: Origin
  plan: str

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
          raise DataError(f"{shown(path)} has rows without a path.")
        tables.append(found.replace_schema_metadata())
    return pa.concat_tables(tables)


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
      f"{shown(path)} has the shards {brief(names)}: expected all of a run of "
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
      f"{shown(path)} holds shards of {max(2, len(different))} runs."
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
      f"{shown(path)} holds no embeddings: expected what embed wrote."
    ) from error
  where = f"{shown(path)}: metadata"
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
        f"{shown(path)}: the column {brief(name)} is "
        f"{brief(str(column_type))}, expected {kind}, as its metadata says."
      )


def shown(path: Path) -> str:
  """A path for messages."""
  return escaped(str(path))

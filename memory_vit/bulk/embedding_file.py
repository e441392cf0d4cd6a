"""Read embeddings back, as arrays from which heads and probes are trained."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32

from memory_vit.bulk import shard_file
from memory_vit.errors import BackboneError, DataError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BackboneId, EvalPreprocessing
from memory_vit.runtime import schema
from memory_vit.runtime.messages import brief, first_line

# As a plan names them.
_SHARD = re.compile(r"part-[0-9]+-of-(?P<shards>[0-9]+)\.parquet")


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Embeddings:
  """Embeddings of images, in their order; unreadable images are left out.

  Attributes:
    paths: of the images, k.
    labels: their classes, or None where the input said nothing.
    pooled: what a head reads.
    layers: what a probe reads: of each block the class token, where there is
      one, and the mean patch, standardized.
    backbone: that made them.
    evaluation: how images were prepared.
    dtype: of the computation.
  """

  paths: tuple[str, ...]
  labels: tuple[str | None, ...]
  pooled: Float32[np.ndarray, "k d"]
  layers: Float32[np.ndarray, "k n d"]
  backbone: BackboneId
  evaluation: EvalPreprocessing
  dtype: str

  def require_backbone(self, backbone: Backbone) -> None:
    """Raise `BackboneError` where another backbone made them."""
    if backbone.id != self.backbone:
      raise BackboneError(
        f"the embeddings are of the backbone {self.backbone}, and this is "
        f"{backbone.id}: load the one that made them."
      )

  def class_names(self) -> tuple[str, ...]:
    """The labels that occur: numbers in their order, else by the alphabet."""
    found = {label for label in self.labels if label is not None}
    numbers = all(label.isdecimal() for label in found)
    return tuple(sorted(found, key=int if numbers else None))


def read_embeddings(path: str | os.PathLike[str]) -> Embeddings:
  """Read what `embed` wrote: a directory of shards, or one file.

  Args:
    path: its --output.

  Raises:
    DataError: where it is not there, is something else, or shards are missing.
  """
  path = Path(path)
  files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
  _require_all(path, files)
  tables, abouts = [], []
  for file in files:
    try:
      table = pq.read_table(file, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
      raise DataError(f"{file} cannot be read: {first_line(error)}.") from error
    abouts.append(_described(file, table))
    tables.append(table.replace_schema_metadata())
  different = [a for a in abouts if a["plan"] != abouts[0]["plan"]]
  if different:
    raise DataError(f"{path} holds shards of {len(different) + 1} runs.")
  table = pa.concat_tables(tables)
  return _embeddings(table.filter(table["error"].is_null()), abouts[0], path)


def _require_all(path: Path, files: list[Path]) -> None:
  """Refuse a directory in which shards are missing."""
  expected = 1
  if path.is_dir() and files:
    named = _SHARD.fullmatch(files[0].name)
    if not named:
      raise DataError(
        f"{path} holds {brief(files[0].name)}, which is no shard: expected "
        "what embed wrote, and nothing else beside it."
      )
    expected = int(named["shards"])
  if len(files) != expected:
    raise DataError(
      f"{path} has {len(files)} of {expected} shards: expected the --output of "
      "a run of embed that ended; give the same command again to finish it."
    )


def _described(file: Path, table: pa.Table) -> Mapping[str, Any]:
  """The metadata of a file of embeddings."""
  try:
    about = json.loads((table.schema.metadata or {})[shard_file.METADATA])
    if about["rows"] == "embeddings":
      return about
  except (LookupError, TypeError, ValueError):
    pass
  raise DataError(f"{file} holds no embeddings: expected what embed wrote.")


def _embeddings(
  table: pa.Table, about: Mapping[str, Any], path: Path
) -> Embeddings:
  where = f"{path}: metadata"
  arrays = {
    name: _values(table[name], shape, about["values"]["dtype"], path)
    for name, shape in about["values"]["shapes"].items()
  }
  return Embeddings(
    paths=tuple(table["path"].to_pylist()),
    labels=tuple(table["label"].to_pylist()),
    pooled=arrays["pooled"],
    layers=arrays["layers"],
    backbone=schema.build(BackboneId, about["backbone"], where, DataError),
    evaluation=schema.build(
      EvalPreprocessing, about["preprocessing"], where, DataError
    ),
    dtype=about["dtype"],
  )


def _values(
  column: pa.ChunkedArray, shape: list[int], dtype: str, path: Path
) -> np.ndarray:
  """Bytes of a column -> float32 (k, ...)."""
  kind = np.dtype(jnp.dtype(dtype))
  width = int(np.prod(shape)) * kind.itemsize
  if column.type != pa.binary(width):
    raise DataError(
      f"{path}: a column is of type {column.type}, and its metadata says "
      f"{brief(shape)} values of {dtype}."
    )
  found = np.empty((len(column), *shape), np.float32)
  place = 0
  for chunk in column.chunks:
    buffer = chunk.buffers()[1]
    start = chunk.offset * width
    raw = np.frombuffer(buffer, np.uint8, len(chunk) * width, start)
    found[place : place + len(chunk)] = raw.view(kind).reshape(-1, *shape)
    place += len(chunk)
  return found

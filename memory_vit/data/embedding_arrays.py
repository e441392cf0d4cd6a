"""Read embeddings back, as arrays from which heads and probes are trained."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from memory_vit.data.embedded_rows import EmbeddedRows
from memory_vit.data.embedding_files import open_files
from memory_vit.errors import BackboneError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BackboneId, EvalPreprocessing


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
    """The labels that occur, sorted as `main` sorts folders of classes."""
    return tuple(sorted({label for label in self.labels if label is not None}))


def read_embeddings(path: str | os.PathLike[str]) -> Embeddings:
  """Read what `embed` wrote: a directory of shards.

  Args:
    path: its --output.

  Raises:
    DataError: where it is not there, is something else, or shards are missing.
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
    evaluation=origin.evaluation,
    dtype=origin.dtype,
  )

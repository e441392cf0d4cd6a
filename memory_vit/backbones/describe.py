"""Describe the file of a backbone."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np

from memory_vit.backbones import layouts, load, npz
from memory_vit.backbones.download import KNOWN, local_file
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneReport:
  """The contents of the file of a backbone.

  Attributes:
    path: as it was given.
    layout: how the weights lie in the file.
    config: its shape.
    parameters: the number of values.
    fingerprint: SHA-256, in full.
    arrays: published name -> shape, and dtype in the file.
  """

  path: str
  layout: str
  config: ViTConfig
  parameters: int
  fingerprint: str
  arrays: dict[str, jax.ShapeDtypeStruct]


def inspect_backbone(path: str) -> BackboneReport:
  """Describe the file of a backbone; `path` is as for `load_backbone`.

  Raises:
    BackboneError: as `load_backbone`; and where there is nothing.
  """
  elsewhere = path in KNOWN or "://" in path
  if not (elsewhere or paths.local(path, "it", BackboneError).exists()):
    raise BackboneError(
      f"{path} is not there: expected the .npz file of a backbone, its address "
      f"(https://, gs://) or one of {', '.join(KNOWN)}; or a task directory "
      "(with a task.json), or a directory of such."
    )
  backbone = load.load_backbone(path)
  layout, dtypes = _stored_form(local_file(path))
  arrays = {
    name: jax.ShapeDtypeStruct(array.shape, dtypes[name])
    for name, array in trees.flatten(backbone.params).items()
  }
  return BackboneReport(
    path=path,
    layout=layout,
    config=backbone.config,
    parameters=trees.count(backbone.params),
    fingerprint=backbone.fingerprint,
    arrays=arrays,
  )


def _stored_form(file: Path) -> tuple[str, dict[str, np.dtype]]:
  """The layout of a file, and published name -> dtype in the file."""
  dtypes = {}
  with npz.open_npz(file) as archive:
    entries = layouts.without_prefix(archive.names)
    for name, entry in entries.items():
      array = archive.read(entry)
      for published, _ in layouts.as_published(name, array):
        dtypes[published] = array.dtype
  return _layout_of(entries), dtypes


def _layout_of(names: Collection[str]) -> str:
  """The layout, of those in `backbones/load.py`, of names without prefix."""
  parts = {part for name in names for part in name.split("/")}
  if "pos_embedding" in names:
    stacked = any(n.startswith(layouts.STACKED_BLOCKS) for n in names)
    return "big_vision, blocks stacked" if stacked else "big_vision"
  if parts & layouts.FROM_PRE_LINEN.keys():
    return "vit_jax, layers numbered as before Linen"
  return "vit_jax, layers numbered as by Linen"

"""Describe the source of a backbone."""

import dataclasses

import jax
import numpy as np

from memory_vit.backbones import layouts, load, model_files, model_import
from memory_vit.backbones.download import KNOWN, local_file
from memory_vit.backbones.published import BackboneSource
from memory_vit.backbones.stored_arrays import open_npz
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import fingerprint_of
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneReport:
  """The contents of the source of a backbone."""

  path: str
  layout: str
  config: ViTConfig
  states_config: bool  # see `Published`
  evaluation: EvalPreprocessing | None
  source: BackboneSource | None
  parameters: int
  fingerprint: str
  # By published name; dtype in the file, float32 of a converted model.
  arrays: dict[str, jax.ShapeDtypeStruct]


def inspect_backbone(path: str) -> BackboneReport:
  """Describe any source that `load_backbone` takes."""
  elsewhere = path in KNOWN or "://" in path
  if not (elsewhere or paths.local(path, "it", BackboneError).exists()):
    raise BackboneError(
      f"{path} is not there: expected the .npz file of a backbone, its address "
      f"(https://, gs://, hf://) or one of {', '.join(KNOWN)}; a directory "
      f"with {model_files.CONFIG} and {model_files.WEIGHTS}; or a task "
      "directory (with a task.json), or a directory of tasks."
    )
  published = load.read_published(path)
  dtypes = _stored_dtypes(path) if not load.model_source(path) else {}
  return BackboneReport(
    path=path,
    layout=published.layout,
    config=published.config,
    states_config=published.states_config,
    evaluation=published.evaluation,
    source=published.source or source_of(path),
    parameters=trees.count(published.arrays),
    fingerprint=fingerprint_of(
      published.config, trees.unflatten(published.arrays)
    ),
    arrays={
      name: jax.ShapeDtypeStruct(array.shape, dtypes.get(name, array.dtype))
      for name, array in published.arrays.items()
    },
  )


def source_of(path: str) -> BackboneSource | None:
  """The origin of a model of transformers or timm; hashes its files."""
  model = load.model_source(path)
  return model_import.source_of(model) if model else None


def _stored_dtypes(path: str) -> dict[str, np.dtype]:
  """Published name -> dtype in an .npz file."""
  dtypes = {}
  with open_npz(local_file(path)) as archive:
    names = layouts.without_prefix(archive)
    classes = 0 if layouts.has_map_head(names) else 1
    for name, entry in names.items():
      array = archive.as_stored(entry)
      for published, _ in layouts.as_published(name, array, classes):
        dtypes[published] = array.dtype
  return dtypes

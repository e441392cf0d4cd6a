"""Describe the source of a backbone."""

import dataclasses

import jax

from memory_vit.backbones import load, model_files, model_import
from memory_vit.backbones.download import KNOWN
from memory_vit.backbones.published import BackboneSource, Normalization
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import fingerprint_of
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import paths
from memory_vit.runtime.messages import escaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneReport:
  """Description of a backbone, and of the files that it was read from."""

  path: str
  layout: str
  config: ViTConfig
  # Whether the files state `config`; if not, array shapes determine it.
  states_config: bool
  normalization: Normalization
  preprocessing: EvalPreprocessing | None
  preprocessing_from: str
  source: BackboneSource | None
  parameters: int
  fingerprint: str
  # {name of an array: its shape and dtype}. For an .npz file, the dtype is the
  # stored dtype. For a model of transformers or timm, it is always float32.
  arrays: dict[str, jax.ShapeDtypeStruct]


def inspect_backbone(path: str) -> BackboneReport:
  """Describe any source that `load_backbone` takes."""
  elsewhere = path in KNOWN or "://" in path
  if not (elsewhere or paths.local(path, "the source", BackboneError).exists()):
    raise BackboneError(
      f"{escaped(path)} is not there: expected the .npz file of a backbone; "
      "an address that starts with https://, gs:// or hf://; one of the names "
      f"{', '.join(KNOWN)}; a directory with {model_files.CONFIG} and "
      f"{model_files.WEIGHTS}; a task directory (with a task.json); or a "
      "directory of tasks."
    )
  published = load.read_published(path)
  return BackboneReport(
    path=path,
    layout=published.layout,
    config=published.config,
    states_config=published.states_config,
    normalization=published.normalization,
    preprocessing=published.preprocessing,
    preprocessing_from=published.preprocessing_from,
    source=published.source or source_of(path),
    parameters=trees.count(published.arrays),
    fingerprint=fingerprint_of(
      published.config, trees.unflatten(published.arrays)
    ),
    arrays={
      name: jax.ShapeDtypeStruct(
        array.shape, published.dtypes.get(name, array.dtype)
      )
      for name, array in published.arrays.items()
    },
  )


def source_of(path: str) -> BackboneSource | None:
  """Return origin and file hashes of a transformers or timm model, or None."""
  model = load.model_source(path)
  return model_import.source_of(model) if model else None

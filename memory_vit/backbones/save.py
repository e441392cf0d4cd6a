"""Write a `Backbone` to an .npz file, or to a directory for transformers."""

import dataclasses
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from memory_vit.backbones import hf_export, layouts
from memory_vit.backbones.layouts import Arrays
from memory_vit.backbones.load import infer_config
from memory_vit.backbones.published import ENTRY, BackboneSource, Note, to_text
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, require_float32
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import files, paths

FORMATS = ("npz", "hf")


def save_backbone(
  backbone: Backbone,
  path: str | os.PathLike[str],
  *,
  format: str = "npz",
  source: BackboneSource | None = None,
) -> None:
  """Write a backbone, for this library or for others.

  An earlier file or directory is replaced once the new one is complete.

  Args:
    backbone: the backbone to write.
    path: the file or directory to write.
    format: "npz" is a file in the layout of the published files, with a note of
      all settings that the shapes do not determine. `load_backbone` reads the
      same parameters from it. The fingerprint changes only if the position
      embedding was resized. "hf" is a directory that transformers loads as a
      `ViTForImageClassification`, or as a `ViTModel` if there is no head.
    source: the origin of a converted backbone, to be noted in an .npz file.

  Raises:
    BackboneError: for an unknown format, for weights that are rounded to
      bfloat16, and with "hf" for a backbone that a `ViTModel` cannot compute.
    TrainingError: if the file or directory cannot be written.
  """
  if format not in FORMATS:
    raise BackboneError(
      f"format is {format!r}, expected one of {', '.join(FORMATS)}."
    )
  require_float32(backbone)
  path = paths.as_path(path)
  arrays = {k: np.asarray(v) for k, v in trees.flatten(backbone.params).items()}
  if format == "hf":
    hf_export.write(backbone, arrays, path)
  else:
    _write_npz(_note(backbone, arrays, source), arrays, path)


def _write_npz(note: Note | None, arrays: Arrays, path: Path) -> None:
  named: dict[str, Any] = {
    layouts.renumbered(name, layouts.TO_PRE_LINEN): array
    for name, array in arrays.items()
  }
  with files.writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as part:
      with part.open("wb") as file:
        np.savez(file, **named)  # all arrays are float32, so none is pickled
      if note:
        with zipfile.ZipFile(part, "a") as archive:
          archive.writestr(ENTRY, to_text(note))


def _note(
  backbone: Backbone, arrays: Arrays, source: BackboneSource | None
) -> Note | None:
  """Return the `Note` for an .npz file; None if a note is not needed."""
  config = dataclasses.replace(backbone.config, dtype="float32")
  # An .npz file without a note has this preprocessing.
  plain = EvalPreprocessing(image_size=config.image_size)
  if (
    not source
    and backbone.preprocessing in (None, plain)
    and _shapes_determine(arrays, config)
  ):
    return None
  return Note(
    config=config, preprocessing=backbone.preprocessing, source=source
  )


def _shapes_determine(arrays: Arrays, config: ViTConfig) -> bool:
  """Return whether array shapes alone are enough to infer `config`."""
  try:
    return infer_config(arrays, Path()) == config
  except BackboneError:  # for instance if the model has no class token
    return False

"""A backbone as a directory that transformers loads.

The inverse of `families/hf_vit.py`, for the ViTs that transformers has: images
are normalized by 0.5 and 0.5, which is what ours take.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from memory_vit.backbones import model_files
from memory_vit.backbones.families import hf_vit
from memory_vit.backbones.families.stated import TRANSFORMERS
from memory_vit.backbones.families.table import HEAD, unconverted
from memory_vit.backbones.layouts import Arrays
from memory_vit.errors import BackboneError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import files, paths
from memory_vit.runtime.messages import brief

# What every such ViT has; `position_resize` matters at other sizes alone.
_COMPUTED = {
  "class_tokens": 1,
  "registers": 0,
  "positions": "learned",
  "pre_norm": False,
  "mlp": "gelu",
  "pooling": "tok",
}
_ACTIVATIONS = {
  "exact": "gelu",
  "tanh": "gelu_pytorch_tanh",
  "quick": "quick_gelu",
}
# In the weights. transformers asks for the format; by the rest we know ours.
_WRITER = {"written_by": "memory_vit"}
_METADATA = {"format": "pt", **_WRITER}
_WRITTEN = {model_files.CONFIG, model_files.PREPROCESSOR, model_files.WEIGHTS}
_RESAMPLES = {"bilinear": 2, "bilinear_antialias": 2, "bicubic": 3}


def write(backbone: Backbone, arrays: Arrays, path: Path) -> None:
  """Write config.json, model.safetensors and preprocessor_config.json.

  Args:
    backbone: to be written.
    arrays: its parameters, by name.
    path: of the directory; one that was written here before is replaced.

  Raises:
    BackboneError: where a ViT of transformers cannot compute the same, or
      something else lies there.
  """
  config = backbone.config
  _require_possible(config)
  paths.require_replaceable(path, "the directory", BackboneError)
  path = path.resolve()  # a link stays one
  _require_replaceable(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  named = _named(arrays, config)
  texts = {
    model_files.CONFIG: _config(config),
    model_files.PREPROCESSOR: _preprocessor(backbone),
  }
  with files.replacing_directory(path, _foreign_file) as new:
    new.mkdir()
    safetensors.numpy.save_file(
      {name: np.ascontiguousarray(array) for name, array in named.items()},
      new / model_files.WEIGHTS,
      _METADATA,
    )
    for name, values in texts.items():
      text = json.dumps(values, indent=2) + "\n"
      (new / name).write_text(text, encoding="utf-8")


def _require_possible(config: ViTConfig) -> None:
  for name, value in _COMPUTED.items():
    if getattr(config, name) != value:
      raise BackboneError(
        f"a ViT of transformers has {name} {value!r}, this backbone has "
        f"{getattr(config, name)!r}: save it as an .npz file."
      )
  if config.num_classes and config.representation_size:
    raise BackboneError(
      f"a ViT of transformers has a head or a pooler, this backbone has "
      f"{config.num_classes} classes and a representation_size of "
      f"{config.representation_size}: save it as an .npz file."
    )


def _require_replaceable(path: Path) -> None:
  """Nothing but what `write` has written is replaced."""
  if not path.exists():
    return
  if not path.is_dir():
    raise BackboneError(
      f"{path} is a file: it is left as it is. Give another path."
    )
  try:
    other = _foreign_file(path)
  except OSError as error:
    raise BackboneError(
      f"{path} cannot be read ({error.strerror or error}). Give another path."
    ) from error
  if other:
    raise BackboneError(
      f"{path} is there, and has {brief(other)} in it: it is left as it "
      "is. Give a new or an empty directory."
    )


def _foreign_file(path: Path) -> str | None:
  """A file that `write` has not written; None where there is none.

  A model of somebody else's has files of the same names.

  Raises:
    OSError: where the directory cannot be read.
  """
  ours = _WRITTEN if _is_ours(path / model_files.WEIGHTS) else set()
  with os.scandir(path) as entries:
    others = [
      entry.name
      for entry in entries
      if entry.name not in ours or not entry.is_file(follow_symlinks=False)
    ]
  return min(others, default=None)


def _is_ours(weights: Path) -> bool:
  """Whether `write` has written a file of weights."""
  try:
    with safetensors.safe_open(weights, "np") as file:
      return _WRITER.items() <= (file.metadata() or {}).items()
  except (OSError, safetensors.SafetensorError):
    return False


def _named(arrays: Arrays, config: ViTConfig) -> dict[str, np.ndarray]:
  """The arrays under the names of transformers."""
  rows = hf_vit.rows(qkv_bias=True)
  if config.num_classes:
    rows = {f"vit.{name}": place for name, place in rows.items()}
  return unconverted({**rows, "classifier": HEAD}, config, arrays)


def _config(config: ViTConfig) -> dict[str, Any]:
  head = config.num_classes > 0
  values: dict[str, Any] = {
    "architectures": ["ViTForImageClassification" if head else "ViTModel"],
    "model_type": "vit",
    "hidden_act": _ACTIVATIONS[config.gelu],
    **{TRANSFORMERS[name]: getattr(config, name) for name in hf_vit.FIELDS},
    "num_channels": 3,
    "qkv_bias": True,
  }
  if head:  # transformers counts the classes by it
    labels = [f"LABEL_{i}" for i in range(config.num_classes)]
    values["id2label"] = dict(enumerate(labels))
    values["label2id"] = {label: i for i, label in enumerate(labels)}
  if config.representation_size:
    values["pooler_act"] = "tanh"
    values["pooler_output_size"] = config.representation_size
  return values


def _preprocessor(backbone: Backbone) -> dict[str, Any]:
  side = backbone.config.image_size
  evaluation = backbone.evaluation or EvalPreprocessing(image_size=side)
  values: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor",
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": _RESAMPLES[evaluation.interpolation],
    "rescale_factor": 1 / 255,
    "size": {"height": side, "width": side},
  }
  if evaluation.resize:  # transformers rounds where the crop begins down
    values["do_center_crop"] = True
    values["crop_size"] = values["size"]
    values["size"] = {"shortest_edge": evaluation.resize}
  return values

"""Write a backbone as a directory that transformers loads.

The inverse of `families/hf_vit.py`. The written mean and std are 0.5, because
our backbones take images in [-1, 1].
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from memory_vit.backbones import model_files
from memory_vit.backbones.families import hf_vit
from memory_vit.backbones.families.table import HEAD, unconverted
from memory_vit.backbones.families.vit_fields import TRANSFORMERS
from memory_vit.backbones.layouts import Arrays
from memory_vit.errors import BackboneError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import files
from memory_vit.runtime.output_directory import OutputDirectory

# {field of `ViTConfig`: value in every ViT of transformers}. `position_resize`
# is left out, because it only matters if the image size changes.
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
# Metadata of model.safetensors. `_WRITER` marks a directory that `write` may
# replace. "format" is required by transformers.
_WRITER = {"written_by": "memory_vit"}
_METADATA = {"format": "pt", **_WRITER}
_RESAMPLES = {"bilinear": 2, "bilinear_antialias": 2, "bicubic": 3}


def _written(path: Path) -> Collection[str]:
  """Return the names of the files in `path`; () if `write` did not write them.

  `write` marks its output with `_WRITER` in the weights file. A mark in a JSON
  file would get into models that transformers saves, because transformers
  copies unknown keys of JSON files.
  """
  try:
    with safetensors.safe_open(path / model_files.WEIGHTS, "np") as file:
      if not _WRITER.items() <= (file.metadata() or {}).items():
        return ()
  except (OSError, safetensors.SafetensorError):
    return ()
  return model_files.CONFIG, model_files.PREPROCESSOR, model_files.WEIGHTS


_DIRECTORY = OutputDirectory("the directory", _written, BackboneError)


def write(backbone: Backbone, arrays: Arrays, path: Path) -> None:
  """Write config.json, model.safetensors and preprocessor_config.json."""
  config = backbone.config
  _require_possible(config)
  path = _DIRECTORY.require_own(path)
  renamed = _transformers_arrays(arrays, config)
  with _DIRECTORY.replacing(path, safetensors.SafetensorError) as new:
    safetensors.numpy.save_file(
      {name: np.ascontiguousarray(array) for name, array in renamed.items()},
      new / model_files.WEIGHTS,
      _METADATA,
    )
    files.write_json(new / model_files.CONFIG, _config(config))
    files.write_json(new / model_files.PREPROCESSOR, _preprocessor(backbone))


def _require_possible(config: ViTConfig) -> None:
  for name, value in _COMPUTED.items():
    if getattr(config, name) != value:
      raise BackboneError(
        f"this backbone has {name} {getattr(config, name)!r}, but a ViT of "
        f"transformers always has {value!r}: save the backbone as an .npz file."
      )
  if config.num_classes and config.representation_size:
    raise BackboneError(
      "the library transformers supports a head or a pooler, but this backbone "
      f"has both ({config.num_classes} classes, representation_size "
      f"{config.representation_size}): save the backbone as an .npz file."
    )


def _transformers_arrays(
  arrays: Arrays, config: ViTConfig
) -> dict[str, np.ndarray]:
  """Return our arrays with the names and shapes of transformers."""
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
  if head:  # transformers takes the number of classes from `id2label`
    labels = [f"LABEL_{i}" for i in range(config.num_classes)]
    values["id2label"] = dict(enumerate(labels))
    values["label2id"] = {label: i for i, label in enumerate(labels)}
  if config.representation_size:
    values["pooler_act"] = "tanh"
    values["pooler_output_size"] = config.representation_size
  return values


def _preprocessor(backbone: Backbone) -> dict[str, Any]:
  side = backbone.config.image_size
  preprocessing = backbone.preprocessing or EvalPreprocessing(image_size=side)
  values: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor",
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": _RESAMPLES[preprocessing.interpolation],
    "rescale_factor": 1 / 255,
    "size": {"height": side, "width": side},
  }
  # transformers rounds the offset of the crop down, so that a "central_rounded"
  # crop may shift by one pixel.
  if preprocessing.resize:
    values["do_center_crop"] = True
    values["crop_size"] = values["size"]
    values["size"] = {"shortest_edge": preprocessing.resize}
  return values

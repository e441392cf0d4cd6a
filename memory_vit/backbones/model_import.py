"""Read backbones from the files of transformers and timm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memory_vit.backbones import image_processor, json_files, model_files
from memory_vit.backbones.families import detect, fold
from memory_vit.backbones.families.detect import Converted
from memory_vit.backbones.families.table import Arrays
from memory_vit.backbones.image_processor import ImageProcessor
from memory_vit.backbones.model_files import ModelFiles
from memory_vit.backbones.published import BackboneSource, Published
from memory_vit.errors import BackboneError

# In the first lines of a README.md; the name stands beside license "other".
_LICENCE_NAME = re.compile(r"^license_name: *([A-Za-z0-9._-]{1,60}) *$", re.M)
_LICENCE = re.compile(r"^license: *([A-Za-z0-9._-]{1,60}) *$", re.M)
_CARD_BYTES = 2**16
_NO_LICENCE = "not stated in its files: see where it was published"


def read(files: ModelFiles) -> Published:
  config = json_files.read_object(files.config)
  family = detect.family_of(config, str(files.config))
  stated = _stated_processor(config, files)
  with files.open_weights() as tensors:
    converted = detect.convert(config, tensors, str(files.config))
  processor = stated or _default_processor(converted, files)
  return Published(
    config=converted.config,
    arrays=_normalized(converted.arrays, processor),
    where=str(files.weights),
    layout=f"{family}, {files.weights.name}",
    states_config=True,
    evaluation=processor.evaluation,
  )


def source_of(files: ModelFiles) -> BackboneSource:
  """Describe the origin of a converted model; reads all of its files."""
  config = json_files.read_object(files.config)
  return BackboneSource(
    name=files.source,
    family=detect.family_of(config, str(files.config)),
    licence=_licence(config, files),
    files=files.digests(),
  )


def _normalized(arrays: Arrays, processor: ImageProcessor) -> dict[str, Any]:
  """Fold the normalization into the patches: they take images in [-1, 1]."""
  kernel, bias = fold.fold_normalization(
    arrays["embedding/kernel"], arrays["embedding/bias"],
    processor.mean, processor.std,
  )  # fmt: skip
  return {**arrays, "embedding/kernel": kernel, "embedding/bias": bias}


def _stated_processor(
  config: Mapping[str, Any], files: ModelFiles
) -> ImageProcessor | None:
  """The image preprocessing that the files state, if they do."""
  if files.preprocessor:
    values = json_files.read_object(files.preprocessor)
    return image_processor.of_transformers(values, str(files.preprocessor))
  if config.get("pretrained_cfg") is not None:
    where = f"{files.config}: pretrained_cfg"
    return image_processor.of_timm(config["pretrained_cfg"], where)
  return None


def _default_processor(
  converted: Converted, files: ModelFiles
) -> ImageProcessor:
  """The image preprocessing that the model family documents, if it does."""
  if not converted.plain_images:
    raise BackboneError(
      f"{files.config} has no {model_files.PREPROCESSOR} beside it, which says "
      "by what mean and deviation images are normalized: fetch it from the "
      "source of the model."
    )
  half = (0.5, 0.5, 0.5)
  return ImageProcessor(mean=half, std=half, evaluation=None)


def _licence(config: Mapping[str, Any], files: ModelFiles) -> str:
  """The licence in timm's configuration or in the README.md of the hub."""
  stated = config.get("pretrained_cfg")
  found = stated.get("license") if isinstance(stated, Mapping) else None
  if isinstance(found, str) and _LICENCE.fullmatch(f"license: {found}"):
    return found
  if files.card:
    with files.card.open("rb") as opened:
      text = opened.read(_CARD_BYTES).decode("utf-8", "replace")
    if match := _LICENCE_NAME.search(text) or _LICENCE.search(text):
      return match[1]
  return _NO_LICENCE

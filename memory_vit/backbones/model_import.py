"""Read backbones from the files of transformers and timm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memory_vit.backbones import image_processor, json_files, model_files
from memory_vit.backbones.families import detect, fold
from memory_vit.backbones.families.fold import Rgb
from memory_vit.backbones.families.table import Arrays
from memory_vit.backbones.image_processor import ImageProcessor
from memory_vit.backbones.model_files import ModelFiles
from memory_vit.backbones.published import (
  BackboneSource,
  Normalization,
  Published,
)
from memory_vit.errors import BackboneError, ConfigError
from memory_vit.runtime import hub
from memory_vit.runtime.messages import brief

# Lines that state the licence in a README.md. If the licence is "other",
# `license_name` states its name.
_LICENCE_NAME = re.compile(r"^license_name: *([A-Za-z0-9._-]{1,60}) *$", re.M)
_LICENCE = re.compile(r"^license: *([A-Za-z0-9._-]{1,60}) *$", re.M)
_CARD_BYTES = 2**16
_TIMM = "timm"
_NO_LICENCE = "not stated in its files: see where it was published"


def read(files: ModelFiles, given: Mapping[str, Rgb]) -> Published:
  """Read a model; `given` has the mean and std if no file states them."""
  config = json_files.read_object(files.config)
  family = detect.family_of(config, str(files.config))
  processor = _stated_processor(config, family, files)
  normalization = _normalization(processor, given)
  if absent := [n for n in ("mean", "std") if n not in normalization]:
    raise _unstated(" and ".join(absent), config, family, files)
  processor.warn()
  with files.open_weights() as tensors:
    converted = detect.convert(config, tensors, str(files.config))
  return Published(
    config=converted.config,
    arrays=_normalized(converted.arrays, normalization),
    where=str(files.weights),
    layout=f"{family}, {files.weights.name}",
    states_config=True,
    preprocessing=processor.preprocessing,
    normalization=normalization,
    preprocessing_from=f"{processor.origin}{processor.defaults}",
  )


def source_of(files: ModelFiles) -> BackboneSource:
  """Describe the origin of a converted model; hashes all of its files."""
  config = json_files.read_object(files.config)
  return BackboneSource(
    name=files.source,
    family=detect.family_of(config, str(files.config)),
    licence=_licence(config, files),
    files=files.digests(),
  )


def _normalized(arrays: Arrays, normalization: Normalization) -> dict[str, Any]:
  """Return `arrays` with `normalization` folded into the patch embedding."""
  kernel, bias = fold.fold_normalization(
    arrays["embedding/kernel"], arrays["embedding/bias"],
    normalization["mean"][0], normalization["std"][0],
  )  # fmt: skip
  return {**arrays, "embedding/kernel": kernel, "embedding/bias": bias}


def _stated_processor(
  config: Mapping[str, Any], family: str, files: ModelFiles
) -> ImageProcessor:
  """Return the image processor; mean or std is None if no file states it."""
  if file := files.preprocessor:
    values, where = json_files.read_object(file), str(file)
    if file.name == model_files.PROCESSOR:
      values, where = values["image_processor"], f"{where}: image_processor"
    return image_processor.of_transformers(values, where, family)
  stated, where = config.get("pretrained_cfg"), str(files.config)
  if stated is not None:
    return image_processor.of_timm(stated, f"{where}: pretrained_cfg")
  # In early config.json files of timm, preprocessing is at the top level.
  return image_processor.of_timm(config if family == _TIMM else {}, where)


def _normalization(
  processor: ImageProcessor, given: Mapping[str, Rgb]
) -> Normalization:
  """Return the mean and std that `processor` states, or else those in `given`.

  Raise if both have a value, and the values differ.
  """
  normalization = {
    name: (value, f"the argument {name}") for name, value in given.items()
  }
  for name, stated in (("mean", processor.mean), ("std", processor.std)):
    if stated and given.get(name, stated) != stated:
      raise ConfigError(
        f"{name} is {given[name]}, but {processor.origin} states {stated}: "
        "leave out the argument."
      )
    if stated:
      normalization[name] = (stated, processor.origin)
  return normalization


def _unstated(
  missing: str, config: Mapping[str, Any], family: str, files: ModelFiles
) -> BackboneError:
  """Return an error that says where to find the missing mean or std."""
  wanted = f"{model_files.PROCESSOR} or {model_files.PREPROCESSOR}"
  if family.startswith(_TIMM):
    wanted = f"{model_files.CONFIG} with a mean and std in pretrained_cfg"
  source = config.get("_name_or_path")  # transformers 4 writes this field
  if hub.is_address(files.source):
    source = files.source
  return BackboneError(
    f"{files.preprocessor or files.config} states no {missing} for the "
    f"normalization of images: fetch the {wanted} of "
    f"{brief(source) if source else 'its source'} into the same directory. Or "
    f"pass {missing} to mv.load_backbone, or --mean=R,G,B --std=R,G,B to "
    "`memory-vit convert`, which writes an .npz file for the other commands."
  )


def _licence(config: Mapping[str, Any], files: ModelFiles) -> str:
  """Return the licence in config.json or README.md, or else `_NO_LICENCE`."""
  stated = config.get("pretrained_cfg")
  licence = stated.get("license") if isinstance(stated, Mapping) else None
  if isinstance(licence, str) and _LICENCE.fullmatch(f"license: {licence}"):
    return licence
  if files.card:
    with files.card.open("rb") as opened:
      text = opened.read(_CARD_BYTES).decode("utf-8", "replace")
    if match := _LICENCE_NAME.search(text) or _LICENCE.search(text):
      return match[1]
  return _NO_LICENCE

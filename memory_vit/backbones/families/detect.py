"""Detect the family of a published model by its config.json, and convert it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memory_vit.backbones.families import (
  clip,
  dinov2,
  dinov3,
  hf_vit,
  ijepa,
  siglip,
  table,
  timm_dinov3,
  timm_vit,
)
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model
from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime.messages import brief

_Read = Callable[[Fields, Arrays], Model]

# {`model_type` of transformers: function that reads models of this type}.
_TRANSFORMERS: Mapping[str, _Read] = {
  kind: family.read
  for family in (hf_vit, dinov2, dinov3, ijepa, siglip, clip)
  for kind in family.MODEL_TYPES
}
_NAFLEX = (
  "a SigLIP 2 for images of any shape (NaFlex), whose patches are a sequence "
  "with a mask: expected a model for one resolution, with model_type siglip"
)
# `model_type` and prefix of array names in timm models saved by transformers.
_WRAPPER, _PREFIX = "timm_wrapper", "timm_model."
# {`model_type`: text of the error, which says why the model is refused}.
_REFUSED = {
  "deit": (
    "a DeiT with a token for distillation, whose outputs are the mean of two "
    "heads: expected a DeiT without this token, with model_type vit"
  ),
  "siglip2": _NAFLEX,
  "siglip2_vision_model": _NAFLEX,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
  """A model in our layout, before image normalization is folded in."""

  config: ViTConfig
  arrays: dict[str, np.ndarray]


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert a model; `where` names its config.json in messages."""
  kind, read = _family(config, where)
  if kind == _WRAPPER:
    config, arrays = _unwrapped(config, arrays)
  model = read(Fields(config, where), arrays)
  return Converted(
    config=model.config, arrays=table.convert(model, arrays, where)
  )


def _unwrapped(
  config: Mapping[str, Any], arrays: Arrays
) -> tuple[Mapping[str, Any], Arrays]:
  """Return (config, arrays) of the timm model that transformers has wrapped.

  The architecture `TimmWrapperModel` has no head, so `num_classes` becomes 0.
  """
  if config.get("architectures") == ["TimmWrapperModel"]:
    config = {**config, "num_classes": 0}
  prefixed = all(name.startswith(_PREFIX) for name in arrays)
  start = len(_PREFIX) if prefixed else 0
  return config, {name[start:]: arrays[name] for name in arrays}


def family_of(config: Mapping[str, Any], where: str) -> str:
  """Return the name of a family: "timm", or a `model_type` of transformers."""
  return _family(config, where)[0]


def _family(config: Mapping[str, Any], where: str) -> tuple[str, _Read]:
  kind, name = config.get("model_type"), config.get("architecture")
  if isinstance(kind, str) and kind in _TRANSFORMERS:
    return kind, _TRANSFORMERS[kind]
  if isinstance(kind, str) and kind in _REFUSED:
    raise BackboneError(
      f"{where}: model_type {brief(kind)} is {_REFUSED[kind]}."
    )
  if kind in (None, _WRAPPER) and isinstance(name, str):
    for family in (timm_dinov3, timm_vit):
      if family.NAME.match(name):
        return kind or "timm", family.read
  raise BackboneError(
    f"{where}: unsupported model_type {brief(kind)}, architecture "
    f"{brief(name)}: expected a model_type of {', '.join(_TRANSFORMERS)}; "
    "or an architecture of timm, such as vit_*, deit_* or deit3_*."
  )

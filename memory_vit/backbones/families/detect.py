"""Detect the family of a published model, by its config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from memory_vit.backbones.families import (
  clip,
  dinov2,
  dinov3,
  hf_vit,
  siglip,
  timm_dinov3,
  timm_vit,
)
from memory_vit.backbones.families.converted import Arrays, Converted
from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief

Convert = Callable[[Mapping[str, Any], Arrays, str], Converted]

# `model_type` of transformers -> converter.
_TRANSFORMERS: Mapping[str, Convert] = {
  "vit": hf_vit.convert,
  "dinov2": dinov2.convert,
  "dinov2_with_registers": dinov2.convert,
  "dinov3_vit": dinov3.convert,
  "siglip": siglip.convert,
  "siglip_vision_model": siglip.convert,
  "siglip2": siglip.convert,
  "siglip2_vision_model": siglip.convert,
  "clip": clip.convert,
  "clip_vision_model": clip.convert,
}
# `model_type` -> why there is none.
_REFUSED = {
  "deit": (
    "DeiT with a token for distillation, whose outputs are the mean of two "
    "heads: expected one without, which transformers calls vit"
  ),
}
# Beginning of `architecture` of timm -> converter.
_TIMM: Mapping[str, Convert] = {
  "vit_": timm_vit.convert,
  "deit_": timm_vit.convert,
  "deit3_": timm_vit.convert,
}


def family_of(config: Mapping[str, Any], where: str) -> tuple[str, Convert]:
  """The name of a family, and what converts its models.

  Args:
    config: a config.json.
    where: what to call it in messages.

  Raises:
    BackboneError: for a model of none that is known.
  """
  kind = config.get("model_type")
  if isinstance(kind, str) and kind in _TRANSFORMERS:
    return kind, _TRANSFORMERS[kind]
  if isinstance(kind, str) and kind in _REFUSED:
    raise BackboneError(f"{where}: model_type {brief(kind)}: {_REFUSED[kind]}.")
  architecture = config.get("architecture")
  if kind is None and isinstance(architecture, str):
    if timm_dinov3.NAME.fullmatch(architecture):
      return "timm", timm_dinov3.convert
    for begins, convert in _TIMM.items():
      if architecture.startswith(begins):
        return "timm", convert
  timm = ", ".join(f"{begins}*" for begins in _TIMM)
  found = f"model_type {brief(kind)}, architecture {brief(architecture)}"
  raise BackboneError(
    f"{where}: {found}: expected a model_type of transformers out of "
    f"{', '.join(_TRANSFORMERS)}"
    + (f", or an architecture of timm such as {timm}." if timm else ".")
  )

"""Architectures of timm by name, such as `vit_base_patch16_clip_quickgelu_224`.

timm's config.json leaves out what the name implies: a family, a size, the side
of a patch, tags, and the image size. A test compares the architecture of every
name that timm knows with the model that timm builds.
"""

import dataclasses
import re

from memory_vit.errors import BackboneError
from memory_vit.runtime.messages import brief

# {size: (width, depth, heads)}.
_SIZES = {
  "tiny": (192, 12, 3),
  "xsmall": (256, 10, 4),
  "wee": (256, 14, 4),
  "little": (320, 14, 5),
  "small": (384, 12, 6),
  "medium": (512, 12, 8),
  "mediumd": (512, 20, 8),
  "betwixt": (640, 12, 10),
  "base": (768, 12, 12),
  "so150m2": (832, 21, 13),
  "so150m": (896, 18, 14),
  "large": (1024, 24, 16),
  "so400m": (1152, 27, 16),
  "huge": (1280, 32, 16),
  "giant": (1408, 40, 16),
  "giantopt": (1536, 40, 16),
  "gigantic": (1664, 48, 16),
}
# {(size, tag): (width, depth, heads)} for tags that change these numbers.
_TAGGED_SIZES = {
  ("base", "plus"): (896, 12, 14),
  ("small", "36x1"): (384, 36, 6),
  ("giant", "dinov2"): (1536, 40, 24),
  ("giant", "tipsv2"): (1536, 40, 24),
}
_REGISTERS = {"reg1": 1, "reg4": 4}
_TAGS = {
  *("36x1", "clip", "dinov2", "gap", "map", "miil", "plus", "quickgelu"),
  *("siglip", "tipsv2", *_REGISTERS),
}
# Sizes that timm found by architecture search. Models of these sizes have
# LayerScale.
_SEARCHED = {"wee", "little", "medium", "mediumd", "betwixt", "so150m2"}
# Names of the SigLIP 2 models with the tanh GELU. All other models of SigLIP
# and SigLIP 2 in timm have the exact GELU.
_TANH_SIGLIP = re.compile(
  r"vit_(giantopt_patch16_.*|so400m_patch16_.*|large_patch16_.*_512|"
  r"base_patch32_.*)"
)
_NAME = re.compile(
  r"(vit|deit|deit3)_([a-z0-9]+)_patch([1-9][0-9]?)((?:_\w+)?)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """A plain ViT; the fields have the names of timm's arguments."""

  embed_dim: int
  depth: int
  num_heads: int
  patch_size: int
  class_token: bool
  reg_tokens: int
  global_pool: str
  act_layer: str
  norm_epsilon: float
  pre_norm: bool
  layer_scale: bool
  qkv_bias: bool
  swiglu: bool


def architecture(name: str, where: str) -> Architecture:
  """Return the architecture of a name; raise if it is not a plain ViT."""
  match = _NAME.fullmatch(name)
  family, size, patch, rest = match.groups() if match else ("", "", "", "")
  tags = {tag for tag in rest.split("_") if tag and not tag.isdecimal()}
  if size not in _SIZES or not tags <= _TAGS:
    raise BackboneError(
      f"{where}: architecture is {brief(name)}, expected a plain ViT of timm, "
      f"(vit|deit|deit3)_SIZE_patchN[_TAGS]. Sizes: {', '.join(_SIZES)}. Tags: "
      f"{', '.join(sorted(_TAGS))}. Hybrids, parallel blocks, distilled models "
      "and positions other than learned absolute ones are not supported."
    )
  tagged = [
    _TAGGED_SIZES[key] for t in tags if (key := (size, t)) in _TAGGED_SIZES
  ]
  width, depth, heads = tagged[0] if tagged else _SIZES[size]
  clip, siglip = "clip" in tags, "siglip" in tags
  pool = "map" if tags & {"map", "siglip"} else "token"
  if "gap" in tags:
    pool = "avg"
  act_layer = "quick_gelu" if "quickgelu" in tags else "gelu"
  if act_layer == "gelu" and siglip and _TANH_SIGLIP.fullmatch(name):
    act_layer = "gelu_tanh"
  if (size, tags) == ("base", {"gap"}):
    heads = 16
  return Architecture(
    embed_dim=width,
    depth=depth,
    num_heads=heads,
    patch_size=int(patch),
    class_token=pool == "token",
    reg_tokens=sum(_REGISTERS.get(tag, 0) for tag in tags),
    global_pool=pool,
    act_layer=act_layer,
    norm_epsilon=1e-5 if clip else 1e-6,
    pre_norm=clip,
    layer_scale=not (clip or siglip)
    and (
      family == "deit3"
      or size in _SEARCHED
      or bool(tags & {"plus", "36x1", "dinov2", "tipsv2"})
    ),
    qkv_bias=not (
      "miil" in tags
      or size == "so150m2"
      or (size in _SEARCHED and tags == {"gap"})
    ),
    swiglu=size == "giant" and bool(tags & {"dinov2", "tipsv2"}),
  )

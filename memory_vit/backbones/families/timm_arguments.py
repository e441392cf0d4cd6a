"""Arguments of timm models (`model_args`), which change their architecture."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import (
  MAX_HEADS,
  MAX_PATCH_SIZE,
  MAX_REGISTERS,
  MAX_WIDTH,
)
from memory_vit.backbones.families.timm_architectures import Architecture
from memory_vit.backbones.layouts import MAX_DEPTH
from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import MAX_IMAGE_SIZE
from memory_vit.runtime.messages import brief

_POOLS = {name: name for name in ("token", "avg", "map")}
_ACTIVATIONS = {name: name for name in ("gelu", "gelu_tanh", "quick_gelu")}
# Arguments of a model whose effect is in the shapes, or in training alone.
_SEEN_ELSEWHERE = {
  *("mlp_ratio", "fc_norm", "num_classes", "dynamic_img_size"),
  *("dynamic_img_pad", "weight_init", "fix_init"),
  *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"),
  *("attn_drop_rate", "drop_path_rate"),
}
# Arguments of which one value is understood, which is also the default.
_FIXED = {
  "in_chans": 3,
  "pos_embed": "learn",
  "final_norm": True,
  "pool_include_prefix": False,
  "proj_bias": True,
  "qk_norm": False,
  "scale_attn_norm": False,
  "scale_mlp_norm": False,
}
_READ = {
  *("embed_dim", "depth", "num_heads", "patch_size", "class_token"),
  *("reg_tokens", "global_pool", "act_layer", "pre_norm", "init_values"),
  *("qkv_bias", "img_size", "no_embed_class"),
}


def stated(
  implied: Architecture, config: Mapping[str, Any], where: str
) -> Architecture:
  """Change what a name implies by the arguments in `model_args`.

  Args:
    implied: by the name.
    config: a config.json of timm.
    where: what to call it in messages.

  Raises:
    BackboneError: for an argument, or a value, that is not understood.
  """
  fields = Fields(config, where)
  args = fields.section("model_args")
  model_args = config.get("model_args") or {}
  known = _SEEN_ELSEWHERE | _FIXED.keys() | _READ
  unknown = sorted(map(str, model_args.keys() - known))
  if unknown:
    raise BackboneError(
      f"{where}: model_args has {brief(unknown[0])}, which is not understood, "
      f"expected only {', '.join(sorted(known))}."
    )
  for name, value in _FIXED.items():
    args.require(name, value, "another one computes another model", value)
  pool = fields.choice("global_pool", _POOLS, implied.global_pool)
  return dataclasses.replace(
    implied,
    embed_dim=args.int("embed_dim", 1, MAX_WIDTH, implied.embed_dim),
    depth=args.int("depth", 1, MAX_DEPTH, implied.depth),
    num_heads=args.int("num_heads", 1, MAX_HEADS, implied.num_heads),
    patch_size=args.size("patch_size", 1, MAX_PATCH_SIZE, implied.patch_size),
    class_token=args.flag("class_token", implied.class_token),
    reg_tokens=args.int("reg_tokens", 0, MAX_REGISTERS, implied.reg_tokens),
    global_pool=args.choice("global_pool", _POOLS, pool),
    act_layer=args.choice("act_layer", _ACTIVATIONS, implied.act_layer),
    pre_norm=args.flag("pre_norm", implied.pre_norm),
    qkv_bias=args.flag("qkv_bias", implied.qkv_bias),
    layer_scale=_layer_scale(model_args, args, implied),
  )


def image_size(fields: Fields) -> int | None:
  """The side of the images that timm builds the model for, if it is stated.

  Args:
    fields: of a config.json of timm.

  Raises:
    BackboneError: for images that are not square.
  """
  args = fields.section("model_args")
  if args.has("img_size"):
    return args.size("img_size", 1, MAX_IMAGE_SIZE)
  pretrained = fields.section("pretrained_cfg")
  if not pretrained.has("input_size"):
    return None
  side = input_side(pretrained)
  return side if pretrained.flag("fixed_input_size", False) else None


def input_side(pretrained: Fields) -> int:
  """The side of the images that the weights are published for.

  Args:
    pretrained: fields of `pretrained_cfg`.

  Raises:
    BackboneError: for images that are not square.
  """
  _, height, width = pretrained.numbers("input_size", 3, 1, MAX_IMAGE_SIZE)
  if height != width:
    raise BackboneError(
      f"{pretrained.where}: input_size is {height:.0f} x {width:.0f}, expected "
      "a square: models of other images are not computed."
    )
  return int(height)


def _layer_scale(
  model_args: Mapping[str, Any], args: Fields, implied: Architecture
) -> bool:
  """Whether there is one: null, of `init_values`, says that there is none."""
  if "init_values" not in model_args:
    return implied.layer_scale
  return args.optional_float("init_values", 0, 1e3) is not None

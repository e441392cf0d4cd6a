"""Arguments of timm models (`model_args`), which change their architecture."""

import dataclasses
from collections.abc import Iterable

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.timm_architectures import (
  Architecture,
  architecture,
)
from memory_vit.backbones.families.vit_fields import vit_field

_POOLS = {name: name for name in ("token", "avg", "map")}
_ACTIVATIONS = {name: name for name in ("gelu", "gelu_tanh", "quick_gelu")}
# Ignored arguments: array shapes imply them, or they only affect training.
_SEEN_ELSEWHERE = {
  *("mlp_ratio", "fc_norm", "num_classes", "dynamic_img_size"),
  *("dynamic_img_pad", "weight_init", "fix_init"),
  *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"),
  *("attn_drop_rate", "drop_path_rate"),
}
# Arguments for which only the default value is supported.
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
# {field of `ViTConfig`: argument of timm}.
_NUMBERS = {
  "width": "embed_dim",
  "depth": "depth",
  "num_heads": "num_heads",
  "patch_size": "patch_size",
  "registers": "reg_tokens",
}
_FLAGS = ("class_token", "pre_norm", "qkv_bias")
_READ = {
  *(*_NUMBERS.values(), *_FLAGS, "global_pool", "act_layer"),
  *("init_values", "img_size", "no_embed_class"),
}


def model_args(fields: Fields, known: Iterable[str]) -> Fields:
  """Return the arguments of a model; raise if one of them is unknown."""
  args = fields.section("model_args")
  args.require_known(known)
  return args


def architecture_of(fields: Fields) -> Architecture:
  """Return the architecture that the name implies, changed by `model_args`."""
  implied = architecture(fields.text("architecture"), fields.where)
  args = model_args(fields, _SEEN_ELSEWHERE | _FIXED.keys() | _READ)
  for name, value in _FIXED.items():
    args.require(name, value, "other values are not supported", value)
  pool = fields.choice("global_pool", _POOLS, implied.global_pool)
  layer_scale = implied.layer_scale and not args.is_null("init_values")
  if args.has("init_values"):
    layer_scale = args.number("init_values", 0, 1e3) > 0
  return dataclasses.replace(
    implied,
    global_pool=args.choice("global_pool", _POOLS, pool),
    act_layer=args.choice("act_layer", _ACTIVATIONS, implied.act_layer),
    layer_scale=layer_scale,
    **{name: args.flag(name, getattr(implied, name)) for name in _FLAGS},
    **{
      theirs: vit_field(args, ours, theirs, getattr(implied, theirs))
      for ours, theirs in _NUMBERS.items()
    },
  )

"""Arguments of timm models (`model_args`), which change their architecture."""

import dataclasses
from collections.abc import Iterable

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.stated import stated
from memory_vit.backbones.families.table import Arrays
from memory_vit.backbones.families.timm_architectures import (
  Architecture,
  architecture,
)
from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, square_side
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
# Field of `ViTConfig` -> the argument.
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
  """The arguments of a model; refuses those that are not understood."""
  args = fields.section("model_args")
  args.require_known(known)
  return args


def architecture_of(fields: Fields) -> Architecture:
  """What the name of a model implies, changed by its arguments.

  Args:
    fields: of a config.json of timm.

  Raises:
    BackboneError: for a name, an argument or a value that is not understood.
  """
  implied = architecture(fields.text("architecture"), fields.where)
  args = model_args(fields, _SEEN_ELSEWHERE | _FIXED.keys() | _READ)
  for name, value in _FIXED.items():
    args.require(name, value, "another one computes another model", value)
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
      theirs: stated(args, ours, theirs, getattr(implied, theirs))
      for ours, theirs in _NUMBERS.items()
    },
  )


def grid(
  model: Architecture, fields: Fields, arrays: Arrays
) -> tuple[int, int]:
  """The rows of the table of positions, and the side of their square.

  What is stated decides: 15 x 15 rows may be the positions of 14 x 16 patches
  and a class token.

  Raises:
    BackboneError: for positions of anything but one square of patches.
  """
  shape = arrays["pos_embed"].shape if "pos_embed" in arrays else ()
  if len(shape) != 3:
    raise BackboneError(
      f"{fields.where}: pos_embed is {brief(shape) if shape else 'missing'}, "
      "expected an array of 3 axes."
    )
  rows, prefix = shape[1], model.class_token + model.reg_tokens
  tokens, args = {0, prefix}, fields.section("model_args")
  if args.has("no_embed_class"):
    tokens = {0 if args.flag("no_embed_class") else prefix}
  patches = [max(0, rows - n) for n in tokens]
  sides = {side for n in patches if (side := square_side(n))}
  image = _image_size(fields)
  if image:
    sides &= {image // model.patch_size}
  side = sides.pop() if len(sides) == 1 else 0
  if not 0 < side * model.patch_size <= MAX_IMAGE_SIZE:
    size_text = f" of an image of {image} pixels" if image else ""
    raise BackboneError(
      f"{fields.where}: pos_embed has {rows} positions, expected those of one "
      f"square grid of patches{size_text}, with or without the {prefix} tokens "
      f"before them, and of at most {MAX_IMAGE_SIZE} pixels. If the model "
      "takes images of another size, state model_args.img_size."
    )
  return rows, side


def _image_size(fields: Fields) -> int | None:
  """The side of the images that timm builds the model for, if it is stated."""
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

"""DINOv3 ViT, as timm writes it: `vit_*_patch16_dinov3[_qkvb]`.

The same model as in `dinov3`, under other names: one array for query, key and
value, whose biases stand apart. timm pools the mean of the patches, unless
`global_pool` says "token".
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.backbones.families import timm_arguments, torch_layers
from memory_vit.backbones.families.converted import Arrays, Converted, Weights
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import (
  MAX_CLASSES,
  MAX_HEADS,
  MAX_MLP_DIM,
  MAX_PATCH_SIZE,
  MAX_REGISTERS,
  MAX_WIDTH,
  vit_config,
)
from memory_vit.backbones.layouts import MAX_DEPTH
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, ViTConfig
from memory_vit.runtime.messages import brief

# Size -> width, depth, heads, width of the MLP, whether it has a gate.
_SIZES = {
  "tiny": (192, 12, 3, 768, False),
  "small": (384, 12, 6, 1536, False),
  "small_plus": (384, 12, 6, 1536, True),
  "base": (768, 12, 12, 3072, False),
  "large": (1024, 24, 16, 4096, False),
  "huge_plus": (1280, 32, 20, 5120, True),
  "7b": (4096, 40, 32, 8192, True),
}
NAME = re.compile(rf"vit_({'|'.join(_SIZES)})_patch16_dinov3(_qkvb)?")
_POOLING = {"avg": "gap", "token": "tok"}
# Arguments that are read; of the others no published configuration has one.
_READ = {
  *("embed_dim", "depth", "num_heads", "patch_size", "num_reg_tokens"),
  *("global_pool", "num_classes", "in_chans", "img_size", "dynamic_img_size"),
}


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert a DINOv3 of timm.

  The outputs are the mean of the patches, or the class token, after the last
  LayerNorm; or the logits of a head of them.

  Args:
    config: of its config.json.
    arrays: of its file.
    where: what to call the source in messages.

  Raises:
    BackboneError: where the arrays are not exactly those of the architecture.
  """
  fields = Fields(config, where)
  name = NAME.fullmatch(fields.text("architecture"))
  if not name:
    raise BackboneError(
      f"{where}: architecture is {brief(config['architecture'])}, expected one "
      f"of {NAME.pattern}."
    )
  _refuse_unknown(config.get("model_args"), where)
  vit = _config(fields, name[1], arrays, where)
  weights = Weights(arrays, where)
  tree = _tree(weights, vit, qkv_bias=bool(name[2]))
  weights.done()
  return Converted(config=vit, arrays=trees.flatten(tree))


def _refuse_unknown(arguments: Any, where: str) -> None:
  unknown = set(arguments or ()) - _READ if isinstance(arguments, dict) else ()
  for argument in sorted(unknown):
    raise BackboneError(
      f"{where}: model_args has {brief(argument)}, which is not understood, "
      f"expected only {', '.join(sorted(_READ))}."
    )


def _config(fields: Fields, size: str, arrays: Arrays, where: str) -> ViTConfig:
  args = fields.section("model_args")
  args.require("in_chans", 3, "images have three channels here", 3)
  width, depth, heads, mlp_dim, gated = _SIZES[size]
  pools = {name: name for name in _POOLING}
  pool = fields.choice("global_pool", pools, "avg")
  if args.has("embed_dim"):
    mlp_dim = _mlp_dim(arrays, "fc1_g" if gated else "fc1", where)
  return vit_config(
    where,
    width=args.int("embed_dim", 1, MAX_WIDTH, width),
    depth=args.int("depth", 1, MAX_DEPTH, depth),
    num_heads=args.int("num_heads", 1, MAX_HEADS, heads),
    mlp_dim=mlp_dim,
    patch_size=args.size("patch_size", 1, MAX_PATCH_SIZE, 16),
    image_size=_image_size(args, fields.section("pretrained_cfg")),
    num_classes=fields.int("num_classes", 0, MAX_CLASSES),
    gelu="exact",
    layer_norm_epsilon=1e-5,
    registers=args.int("num_reg_tokens", 0, MAX_REGISTERS, 4),
    positions="rope",
    mlp="swiglu" if gated else "gelu",
    pooling=args.choice("global_pool", _POOLING, pool),
  )


def _image_size(args: Fields, pretrained: Fields) -> int:
  """As the model was made, or pretrained: no array has it."""
  if args.has("img_size"):
    return args.size("img_size", 1, MAX_IMAGE_SIZE)
  return timm_arguments.input_side(pretrained)


def _mlp_dim(arrays: Arrays, layer: str, where: str) -> int:
  """The width of the MLP of a model whose width is no published one."""
  name = f"blocks.0.mlp.{layer}.weight"
  shape = arrays[name].shape if name in arrays else ()
  if len(shape) != 2 or not 1 <= shape[0] <= MAX_MLP_DIM:
    raise BackboneError(
      f"{where}: {name} has the shape {brief(shape)}, expected (outputs, "
      f"width) with at most {MAX_MLP_DIM:,} outputs."
    )
  return shape[0]


def _tree(weights: Weights, vit: ViTConfig, *, qkv_bias: bool) -> Tree:
  d = vit.width
  tree: Tree = {
    "embedding": torch_layers.patch_embedding(weights, "patch_embed.proj", vit),
    "cls": weights.take("cls_token", (1, 1, d)),
    "Transformer": {
      **{
        f"encoderblock_{i}": _block(weights, f"blocks.{i}", vit, qkv_bias)
        for i in range(vit.depth)
      },
      "encoder_norm": torch_layers.layer_norm(weights, "norm", d),
    },
  }
  if vit.registers:
    tree["registers"] = weights.take("reg_token", (1, vit.registers, d))
  if vit.num_classes:
    head = torch_layers.linear(weights, "head", d, vit.num_classes)
    tree["head"] = torch_layers.dense(head)
  return tree


def _block(weights: Weights, name: str, vit: ViTConfig, qkv_bias: bool) -> Tree:
  d = vit.width
  scales = [weights.take(f"{name}.gamma_{part}", (d,)) for part in (1, 2)]
  out = torch_layers.linear(weights, f"{name}.attn.proj", d, d)
  return {
    "LayerNorm_0": torch_layers.layer_norm(weights, f"{name}.norm1", d),
    "MultiHeadDotProductAttention_0": torch_layers.attention(
      _qkv(weights, f"{name}.attn", d, qkv_bias), out, vit.num_heads, scales[0]
    ),
    "LayerNorm_1": torch_layers.layer_norm(weights, f"{name}.norm2", d),
    "MlpBlock_0": _mlp(weights, f"{name}.mlp", vit, scales[1]),
  }


def _qkv(
  weights: Weights, name: str, d: int, qkv_bias: bool
) -> list[torch_layers.Linear]:
  """The three layers; keys never have a bias."""
  zero = np.zeros(d, np.float32)
  query, value = (
    weights.take(f"{name}.{part}_bias", (d,)) if qkv_bias else zero
    for part in ("q", "v")
  )
  weight = weights.take(f"{name}.qkv.weight", (3 * d, d))
  bias = np.concatenate([query, zero, value])
  return torch_layers.split(torch_layers.Linear(weight, bias), 3)


def _mlp(
  weights: Weights, name: str, vit: ViTConfig, scale: np.ndarray
) -> Tree:
  d, hidden = vit.width, vit.mlp_dim
  gate, first = None, "fc1"
  if vit.mlp == "swiglu":
    gate = torch_layers.linear(weights, f"{name}.fc1_g", d, hidden)
    first = "fc1_x"
  return torch_layers.mlp(
    torch_layers.linear(weights, f"{name}.{first}", d, hidden),
    torch_layers.linear(weights, f"{name}.fc2", hidden, d),
    gate=gate,
    scale=scale,
  )

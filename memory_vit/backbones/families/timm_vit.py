"""Plain ViTs of timm: `vit_*`, `deit_*` and `deit3_*`.

One array for query, key and value; a class token, registers, LayerScale and a
probe where the architecture has them; the last LayerNorm before or after the
mean. What config.json does not say, the name of the architecture does.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.backbones.families import timm_arguments, torch_layers
from memory_vit.backbones.families.converted import Arrays, Converted, Weights
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import (
  MAX_CLASSES,
  MAX_MLP_DIM,
  vit_config,
)
from memory_vit.backbones.families.timm_architectures import (
  Architecture,
  architecture,
)
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, ViTConfig, square_side
from memory_vit.runtime.messages import brief

_POOLING = {"token": "tok", "avg": "gap", "map": "map"}
_ACTIVATIONS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert a plain ViT of timm.

  The outputs are the logits of its head, or the features in front of it where
  it was made with `num_classes=0`.

  Args:
    config: of its config.json.
    arrays: of its file.
    where: what to call the source in messages.

  Raises:
    BackboneError: where the arrays are not exactly those of the architecture,
      or that is none of a plain ViT.
  """
  fields = Fields(config, where)
  _refuse_distilled(arrays, where)
  implied = architecture(fields.text("architecture"), where)
  model = timm_arguments.stated(implied, config, where)
  vit, positions = _config(model, fields, arrays, where)
  weights = Weights(arrays, where)
  tree = _tree(weights, vit, model, positions)
  weights.done()
  return Converted(config=vit, arrays=trees.flatten(tree))


def _refuse_distilled(arrays: Arrays, where: str) -> None:
  if "dist_token" in arrays or "head_dist.weight" in arrays:
    raise BackboneError(
      f"{where} is a distilled DeiT, whose outputs are the mean of two heads "
      "on two tokens: expected a ViT with one head, such as deit_* without "
      "'distilled', or deit3_*."
    )


def _classes(fields: Fields) -> int:
  """The width of the head; the outer field is the one that timm builds by."""
  if not fields.has("num_classes"):
    fields = fields.section("pretrained_cfg")
  return fields.int("num_classes", 0, MAX_CLASSES)


def _config(
  model: Architecture, fields: Fields, arrays: Arrays, where: str
) -> tuple[ViTConfig, int]:
  """The configuration, and the rows of the table of positions."""
  rows, side = _grid(model, fields, arrays, where)
  pooling = _POOLING[model.global_pool]
  if pooling == "map" and (model.class_token or model.reg_tokens):
    raise BackboneError(
      f"{where}: its probe attends to the patches alone, though there are "
      "tokens before them: expected no class token and no registers."
    )
  config = vit_config(
    where,
    width=model.embed_dim,
    depth=model.depth,
    mlp_dim=_mlp_dim(model, arrays, where),
    num_heads=model.num_heads,
    patch_size=model.patch_size,
    image_size=side * model.patch_size,
    num_classes=_classes(fields),
    gelu=_ACTIVATIONS[model.act_layer],
    layer_norm_epsilon=model.norm_epsilon,
    class_tokens=int(model.class_token),
    registers=model.reg_tokens,
    position_resize="bicubic_antialias",
    pre_norm=model.pre_norm,
    mlp="swiglu" if model.swiglu else "gelu",
    pooling=pooling,
    norm_after_pooling=pooling == "gap" and _has_fc_norm(arrays),
  )
  return config, rows


def _grid(
  model: Architecture, fields: Fields, arrays: Arrays, where: str
) -> tuple[int, int]:
  """The rows of the table of positions, and the side of their square.

  What is stated decides: 15 x 15 rows may be the positions of 14 x 16 patches
  and a class token.
  """
  prefix = model.class_token + model.reg_tokens
  rows = _shape(arrays, "pos_embed", 3, where)[1]
  tokens, args = {0, prefix}, fields.section("model_args")
  if args.has("no_embed_class"):
    tokens = {0 if args.flag("no_embed_class") else prefix}
  patches = [max(0, rows - n) for n in tokens]
  sides = {side for n in patches if (side := square_side(n))}
  image = timm_arguments.image_size(fields)
  if image:
    sides &= {image // model.patch_size}
  if len(sides) != 1:
    size_text = f" of an image of {image} pixels" if image else ""
    raise BackboneError(
      f"{where}: pos_embed has {rows} positions, expected those of one square "
      f"grid of patches{size_text}, with or without the {prefix} tokens before "
      "them. If the model takes images of another size, state "
      "model_args.img_size."
    )
  side = sides.pop()
  if side * model.patch_size > MAX_IMAGE_SIZE:
    raise BackboneError(
      f"{where}: pos_embed has {rows} positions, of an image of "
      f"{side * model.patch_size} pixels: expected at most {MAX_IMAGE_SIZE}."
    )
  return rows, side


def _mlp_dim(model: Architecture, arrays: Arrays, where: str) -> int:
  """The width of the MLPs; a gate lies in the same array as its layer."""
  outputs = _shape(arrays, "blocks.0.mlp.fc1.weight", 2, where)[0]
  layers = 2 if model.swiglu else 1
  if outputs % layers or outputs > layers * MAX_MLP_DIM:
    raise BackboneError(
      f"{where}: blocks.0.mlp.fc1.weight has {outputs:,} outputs, expected "
      f"those of {layers} layers of at most {MAX_MLP_DIM:,}."
    )
  return outputs // layers


def _has_fc_norm(arrays: Arrays) -> bool:
  """Whether the last LayerNorm comes after the mean, which it is named for."""
  return "fc_norm.weight" in arrays or "fc_norm.bias" in arrays


def _shape(arrays: Arrays, name: str, rank: int, where: str) -> tuple[int, ...]:
  """The shape of an array that tells that of the model."""
  shape = arrays[name].shape if name in arrays else None
  if shape is None or len(shape) != rank:
    raise BackboneError(
      f"{where}: {name} is {'missing' if shape is None else brief(shape)}, "
      f"expected an array of {rank} axes."
    )
  return shape


def _tree(
  weights: Weights, vit: ViTConfig, model: Architecture, rows: int
) -> Tree:
  d = vit.width
  tokens, positions = _tokens(weights, vit, rows)
  # Of one token it is the same before and after it is picked.
  after = vit.norm_after_pooling or weights.has("fc_norm.weight")
  last = "fc_norm" if after and vit.pooling != "map" else "norm"
  encoder: Tree = {
    "posembed_input": {"pos_embedding": positions},
    **{
      f"encoderblock_{i}": _block(weights, f"blocks.{i}", vit, model)
      for i in range(vit.depth)
    },
    "encoder_norm": torch_layers.layer_norm(weights, last, d),
  }
  if vit.pre_norm:
    encoder["pre_norm"] = torch_layers.layer_norm(weights, "norm_pre", d)
  tree: Tree = {
    "embedding": torch_layers.patch_embedding(
      # timm leaves the bias to the LayerNorm behind it.
      weights, "patch_embed.proj", vit, bias=not vit.pre_norm
    ),
    "Transformer": encoder,
    **tokens,
  }  # fmt: skip
  if vit.pooling == "map":
    tree["MAPHead_0"] = _map_head(weights, vit)
  if vit.num_classes:
    head = torch_layers.linear(weights, "head", d, vit.num_classes)
    tree["head"] = torch_layers.dense(head)
  return tree


def _tokens(
  weights: Weights, vit: ViTConfig, rows: int
) -> tuple[Tree, np.ndarray]:
  """Class token, registers, and the table of positions.

  Where the table has rows for the tokens in front, that of the class stays and
  those of the registers are added to them; where it has not, that of the class
  is zero.
  """
  classes, registers, d = vit.class_tokens, vit.registers, vit.width
  tree: Tree = {}
  if classes:
    tree["cls"] = weights.take("cls_token", (1, classes, d))
  if registers:
    tree["registers"] = weights.take("reg_token", (1, registers, d))
  table = weights.take("pos_embed", (1, rows, d))
  if rows == vit.num_patches:
    return tree, np.pad(table, ((0, 0), (classes, 0), (0, 0)))
  before = classes + registers
  if registers:
    tree["registers"] = tree["registers"] + table[:, classes:before]
  return tree, np.concatenate([table[:, :classes], table[:, before:]], axis=1)


def _block(
  weights: Weights, name: str, vit: ViTConfig, model: Architecture
) -> Tree:
  d = vit.width
  fused = torch_layers.linear(
    weights, f"{name}.attn.qkv", d, 3 * d, bias=model.qkv_bias
  )
  out = torch_layers.linear(weights, f"{name}.attn.proj", d, d)
  scales = [
    weights.take(f"{name}.ls{part}.gamma", (d,)) if model.layer_scale else None
    for part in (1, 2)
  ]
  return {
    "LayerNorm_0": torch_layers.layer_norm(weights, f"{name}.norm1", d),
    "MultiHeadDotProductAttention_0": torch_layers.attention(
      torch_layers.split(fused, 3), out, vit.num_heads, scales[0]
    ),
    "LayerNorm_1": torch_layers.layer_norm(weights, f"{name}.norm2", d),
    "MlpBlock_0": _mlp(weights, f"{name}.mlp", vit, scales[1]),
  }


def _mlp(
  weights: Weights, name: str, vit: ViTConfig, scale: np.ndarray | None
) -> Tree:
  d, hidden = vit.width, vit.mlp_dim
  second = torch_layers.linear(weights, f"{name}.fc2", hidden, d)
  if vit.mlp == "gelu":
    first = torch_layers.linear(weights, f"{name}.fc1", d, hidden)
    return torch_layers.mlp(first, second, scale=scale)
  stacked = torch_layers.linear(weights, f"{name}.fc1", d, 2 * hidden)
  gate, first = torch_layers.split(stacked, 2)
  return torch_layers.mlp(first, second, gate=gate, scale=scale)


def _map_head(weights: Weights, vit: ViTConfig) -> Tree:
  d, hidden = vit.width, vit.mlp_dim
  query = torch_layers.linear(weights, "attn_pool.q", d, d)
  fused = torch_layers.linear(weights, "attn_pool.kv", d, 2 * d)
  return {
    "probe": weights.take("attn_pool.latent", (1, 1, d)),
    "MultiHeadDotProductAttention_0": torch_layers.attention(
      [query, *torch_layers.split(fused, 2)],
      torch_layers.linear(weights, "attn_pool.proj", d, d),
      vit.num_heads,
    ),
    "LayerNorm_0": torch_layers.layer_norm(weights, "attn_pool.norm", d),
    "MlpBlock_0": torch_layers.mlp(
      torch_layers.linear(weights, "attn_pool.mlp.fc1", d, hidden),
      torch_layers.linear(weights, "attn_pool.mlp.fc2", hidden, d),
    ),
  }

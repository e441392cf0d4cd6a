"""Plain ViTs of timm: `vit_*`, `deit_*` and `deit3_*`.

The outputs are the logits of the head; or the features in front of the head, if
the model was created with `num_classes=0`.
"""

import re

from memory_vit.backbones.families import table, timm_arguments, timm_positions
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model, Table, To
from memory_vit.backbones.families.timm_architectures import Architecture
from memory_vit.backbones.families.vit_fields import (
  LIMITS,
  vit_config,
  vit_field,
  width_of,
)
from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import ViTConfig

NAME = re.compile(r"vit_|deit_|deit3_")
_POOLING = {"token": "tok", "avg": "gap", "map": "map"}
_ACTIVATIONS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}


def read(fields: Fields, arrays: Arrays) -> Model:
  if "dist_token" in arrays or "head_dist.weight" in arrays:
    raise BackboneError(
      f"{fields.where} is a distilled DeiT, whose outputs are the mean of two "
      "heads on two tokens. Expected a ViT with one head, such as a deit_* "
      "without 'distilled' in the name, or a deit3_*."
    )
  model = timm_arguments.architecture_of(fields)
  rows, side = timm_positions.grid(model, fields, arrays)
  pooling = _POOLING[model.global_pool]
  # Whether the last LayerNorm is `fc_norm`, which timm applies after pooling.
  fc_norm = pooling != "map" and (
    "fc_norm.weight" in arrays or "fc_norm.bias" in arrays
  )
  if pooling == "map" and (model.class_token or model.reg_tokens):
    raise BackboneError(
      f"{fields.where}: attention pooling covers only the patches, but the "
      "model has a class token or registers: this is not supported."
    )
  # If the top level has no num_classes, timm reads it from pretrained_cfg.
  has_classes = fields.has("num_classes")
  outer = fields if has_classes else fields.section("pretrained_cfg")
  config = vit_config(
    fields.where,
    width=model.embed_dim,
    depth=model.depth,
    mlp_dim=_mlp_dim(model, arrays, fields.where),
    num_heads=model.num_heads,
    patch_size=model.patch_size,
    image_size=side * model.patch_size,
    num_classes=vit_field(outer, "num_classes", "num_classes"),
    gelu=_ACTIVATIONS[model.act_layer],
    layer_norm_epsilon=model.norm_epsilon,
    class_tokens=int(model.class_token),
    registers=model.reg_tokens,
    position_resize="bicubic_antialias",
    pre_norm=model.pre_norm,
    mlp="swiglu" if model.swiglu else "gelu",
    pooling=pooling,
    # With "tok", LayerNorm gives the same result before and after pooling.
    norm_after_pooling=pooling == "gap" and fc_norm,
  )
  return Model(
    config=config,
    table=_table(model, config, rows, "fc_norm" if fc_norm else "norm"),
    adapt=lambda found: timm_positions.adapt(found, config),
  )


def _mlp_dim(model: Architecture, arrays: Arrays, where: str) -> int:
  """Return the width of the MLPs.

  For SwiGLU, fc1 has twice this number of outputs: gate and up projection.
  """
  outputs = width_of(arrays, "blocks.0.mlp.fc1", "num_classes", where)
  layers = 2 if model.swiglu else 1
  most = LIMITS["mlp_dim"][1]
  if outputs % layers or not 1 <= outputs <= layers * most:
    raise BackboneError(
      f"{where}: blocks.0.mlp.fc1.weight has {outputs:,} outputs, expected "
      f"{layers} * W, where the MLP width W is 1 to {most:,}."
    )
  return outputs // layers


def _table(
  model: Architecture, config: ViTConfig, rows: int, last_norm: str
) -> Table:
  block, d = "blocks.{l}", config.width
  scale = [f"{block}.ls{i}.gamma" if model.layer_scale else "" for i in (1, 2)]
  up = To((table.GATE, table.UP)) if model.swiglu else To(table.UP)
  return {
    # With `pre_norm`, this layer has no bias: the next LayerNorm has one.
    "patch_embed.proj": To(table.PATCHES, bias=not model.pre_norm),
    "cls_token": table.CLASS,
    "reg_token": table.REGISTERS,
    "pos_embed": To(table.POSITIONS, shape=(1, rows, d)),
    "norm_pre": table.PRE_NORM,
    f"{block}.norm1": table.NORM_1,
    f"{block}.attn.qkv": To(table.QKV, bias=model.qkv_bias),
    f"{block}.attn.proj": To(table.OUT, scale=scale[0]),
    f"{block}.norm2": table.NORM_2,
    f"{block}.mlp.fc1": up,
    f"{block}.mlp.fc2": To(table.DOWN, scale=scale[1]),
    last_norm: table.LAST_NORM,
    "attn_pool.latent": table.PROBE,
    "attn_pool.q": table.PROBE_QKV[0],
    "attn_pool.kv": To(table.PROBE_QKV[1:]),
    "attn_pool.proj": table.PROBE_OUT,
    "attn_pool.norm": table.PROBE_NORM,
    "attn_pool.mlp.fc1": table.PROBE_UP,
    "attn_pool.mlp.fc2": table.PROBE_DOWN,
    "head": table.HEAD,
  }

"""DINOv2, with and without registers, as transformers writes it.

Features, without a head: patches of 14 pixels, LayerScale, an exact GELU or, in
the largest one, SwiGLU. Registers have no positions.
"""

from collections.abc import Mapping
from typing import Any

from memory_vit.backbones.families import torch_layers
from memory_vit.backbones.families.converted import Arrays, Converted, Weights
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import (
  MAX_REGISTERS,
  Shape,
  transformers_shape,
  vit_config,
)
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig

_WITH_REGISTERS = "dinov2_with_registers"
# Only pretraining reads it.
_IGNORED = ("embeddings.mask_token",)


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert `Dinov2Model` or `Dinov2WithRegistersModel` of transformers.

  The outputs are the first token after the last LayerNorm (`pooler_output`).

  Args:
    config: of its config.json.
    arrays: of its files.
    where: what to call the source in messages.

  Raises:
    BackboneError: where the arrays are not exactly those of the configuration,
      or it has a head: that of transformers reads the class token and the mean
      of the patches side by side.
  """
  _refuse_head(arrays, where)
  fields = Fields(config, where)
  vit = _config(fields, where)
  weights = Weights(arrays, where, _IGNORED)
  tree = _tree(weights, vit, fields.flag("qkv_bias", True))
  weights.done()
  return Converted(config=vit, arrays=trees.flatten(tree))


def _refuse_head(arrays: Arrays, where: str) -> None:
  if "classifier.weight" in arrays:
    raise BackboneError(
      f"{where} has a classifier that reads the class token and the mean of "
      "the patches side by side, expected DINOv2 without a head: save the "
      "model inside it (model.base_model.save_pretrained) and load that."
    )


def _config(fields: Fields, where: str) -> ViTConfig:
  with_registers = fields.choice(
    "model_type", {"dinov2": False, _WITH_REGISTERS: True}
  )
  shape = transformers_shape(
    fields,
    Shape(
      width=768,
      depth=12,
      num_heads=12,
      patch_size=16 if with_registers else 14,
      image_size=224,
      layer_norm_epsilon=1e-6,
    ),
  )
  hidden = int(shape["width"] * fields.float("mlp_ratio", 0.01, 64, 4))
  swiglu = fields.flag("use_swiglu_ffn", False)
  if not swiglu:
    fields.require("hidden_act", "gelu", "an exact GELU", "gelu")
  registers = 0
  if with_registers:
    registers = fields.int("num_register_tokens", 0, MAX_REGISTERS, 4)
  return vit_config(
    where,
    **shape,
    mlp_dim=_swiglu_width(hidden) if swiglu else hidden,
    mlp="swiglu" if swiglu else "gelu",
    gelu="exact",
    registers=registers,
    position_resize="bicubic_antialias" if with_registers else "bicubic",
  )


def _swiglu_width(hidden: int) -> int:
  """Two thirds, which with a gate are as many weights; a multiple of 8."""
  return (int(hidden * 2 / 3) + 7) // 8 * 8


def _tree(weights: Weights, vit: ViTConfig, qkv_bias: bool) -> Tree:
  d = vit.width
  tree = {
    "embedding": torch_layers.patch_embedding(
      weights, "embeddings.patch_embeddings.projection", vit
    ),
    "cls": weights.take("embeddings.cls_token", (1, 1, d)),
    "Transformer": {
      "posembed_input": {
        "pos_embedding": weights.take(
          "embeddings.position_embeddings", (1, 1 + vit.num_patches, d)
        )
      },
      **{
        f"encoderblock_{i}": _block(weights, i, vit, qkv_bias)
        for i in range(vit.depth)
      },
      "encoder_norm": torch_layers.layer_norm(weights, "layernorm", d),
    },
  }
  if vit.registers:
    name, shape = "embeddings.register_tokens", (1, vit.registers, d)
    tree["registers"] = weights.take(name, shape)
  return tree


def _block(weights: Weights, i: int, vit: ViTConfig, qkv_bias: bool) -> Tree:
  name, d = f"encoder.layer.{i}", vit.width
  qkv = [
    torch_layers.linear(
      weights, f"{name}.attention.attention.{part}", d, d, bias=qkv_bias
    )
    for part in ("query", "key", "value")
  ]
  out = torch_layers.linear(weights, f"{name}.attention.output.dense", d, d)
  scales = [
    weights.take(f"{name}.layer_scale{part}.lambda1", (d,)) for part in (1, 2)
  ]
  return {
    "LayerNorm_0": torch_layers.layer_norm(weights, f"{name}.norm1", d),
    "MultiHeadDotProductAttention_0": torch_layers.attention(
      qkv, out, vit.num_heads, scales[0]
    ),
    "LayerNorm_1": torch_layers.layer_norm(weights, f"{name}.norm2", d),
    "MlpBlock_0": _mlp(weights, f"{name}.mlp", vit, scales[1]),
  }


def _mlp(weights: Weights, name: str, vit: ViTConfig, scale: Any) -> Tree:
  d, hidden = vit.width, vit.mlp_dim
  if vit.mlp == "gelu":
    return torch_layers.mlp(
      torch_layers.linear(weights, f"{name}.fc1", d, hidden),
      torch_layers.linear(weights, f"{name}.fc2", hidden, d),
      scale=scale,
    )
  stacked = torch_layers.linear(weights, f"{name}.weights_in", d, 2 * hidden)
  gate, first = torch_layers.split(stacked, 2)
  second = torch_layers.linear(weights, f"{name}.weights_out", hidden, d)
  return torch_layers.mlp(first, second, gate=gate, scale=scale)

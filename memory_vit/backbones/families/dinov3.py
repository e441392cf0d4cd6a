"""DINOv3 ViT, as transformers writes it.

Features, without a head: rotary positions instead of a table, registers,
LayerScale, keys without bias, SwiGLU in the largest ones.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.backbones.families import torch_layers
from memory_vit.backbones.families.converted import Arrays, Converted, Weights
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import (
  MAX_MLP_DIM,
  MAX_REGISTERS,
  Shape,
  transformers_shape,
  vit_config,
)
from memory_vit.model import trees
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig

_DEFAULTS = Shape(
  width=384,
  depth=12,
  num_heads=6,
  patch_size=16,
  image_size=224,
  layer_norm_epsilon=1e-5,
)
# Only pretraining reads it.
_IGNORED = ("embeddings.mask_token",)
# The part of a layer with a bias -> its flag in config.json, and the default.
_BIASES = {
  "q_proj": ("query_bias", True),
  "k_proj": ("key_bias", False),
  "v_proj": ("value_bias", True),
  "o_proj": ("proj_bias", True),
  "mlp": ("mlp_bias", True),
}


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert `DINOv3ViTModel` of transformers.

  The outputs are the first token after the last LayerNorm (`pooler_output`).

  Args:
    config: of its config.json.
    arrays: of its files.
    where: what to call the source in messages.

  Raises:
    BackboneError: where the arrays are not exactly those of the configuration.
  """
  fields = Fields(config, where)
  vit = _config(fields, where)
  biases = {part: fields.flag(*flag) for part, flag in _BIASES.items()}
  weights = Weights(arrays, where, _IGNORED)
  tree = _tree(weights, vit, biases)
  weights.done()
  return Converted(config=vit, arrays=trees.flatten(tree))


def _config(fields: Fields, where: str) -> ViTConfig:
  gated = fields.flag("use_gated_mlp", False)
  activation, what = ("silu", "SwiGLU") if gated else ("gelu", "an exact GELU")
  fields.require("hidden_act", activation, what, "gelu")
  return vit_config(
    where,
    **transformers_shape(fields, _DEFAULTS),
    mlp_dim=fields.int("intermediate_size", 1, MAX_MLP_DIM, 1536),
    mlp="swiglu" if gated else "gelu",
    gelu="exact",
    registers=fields.int("num_register_tokens", 0, MAX_REGISTERS, 0),
    positions="rope",
    rope_base=fields.float("rope_theta", 1, 1e6, 100),
  )


def _tree(weights: Weights, vit: ViTConfig, biases: dict[str, bool]) -> Tree:
  d = vit.width
  tree = {
    "embedding": torch_layers.patch_embedding(
      weights, "embeddings.patch_embeddings", vit
    ),
    "cls": weights.take("embeddings.cls_token", (1, 1, d)),
    "Transformer": {
      **{
        f"encoderblock_{i}": _block(weights, f"layer.{i}", vit, biases)
        for i in range(vit.depth)
      },
      "encoder_norm": torch_layers.layer_norm(weights, "norm", d),
    },
  }
  if vit.registers:
    name, shape = "embeddings.register_tokens", (1, vit.registers, d)
    tree["registers"] = weights.take(name, shape)
  return tree


def _block(
  weights: Weights, name: str, vit: ViTConfig, biases: dict[str, bool]
) -> Tree:
  d = vit.width
  *qkv, out = (
    torch_layers.linear(
      weights, f"{name}.attention.{part}", d, d, bias=biases[part]
    )
    for part in ("q_proj", "k_proj", "v_proj", "o_proj")
  )
  scales = [
    weights.take(f"{name}.layer_scale{part}.lambda1", (d,)) for part in (1, 2)
  ]
  return {
    "LayerNorm_0": torch_layers.layer_norm(weights, f"{name}.norm1", d),
    "MultiHeadDotProductAttention_0": torch_layers.attention(
      qkv, out, vit.num_heads, scales[0]
    ),
    "LayerNorm_1": torch_layers.layer_norm(weights, f"{name}.norm2", d),
    "MlpBlock_0": _mlp(weights, f"{name}.mlp", vit, biases["mlp"], scales[1]),
  }


def _mlp(
  weights: Weights, name: str, vit: ViTConfig, bias: bool, scale: np.ndarray
) -> Tree:
  d, hidden = vit.width, vit.mlp_dim
  gate = None
  if vit.mlp == "swiglu":
    gate = torch_layers.linear(
      weights, f"{name}.gate_proj", d, hidden, bias=bias
    )
  return torch_layers.mlp(
    torch_layers.linear(weights, f"{name}.up_proj", d, hidden, bias=bias),
    torch_layers.linear(weights, f"{name}.down_proj", hidden, d, bias=bias),
    gate=gate,
    scale=scale,
  )

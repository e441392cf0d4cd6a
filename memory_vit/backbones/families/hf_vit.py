"""`ViTModel` and `ViTForImageClassification` of transformers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.backbones.families import fold
from memory_vit.backbones.families.converted import (
  Arrays,
  Converted,
  Weights,
)
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import vit_config
from memory_vit.backbones.layouts import BLOCK, MAX_DEPTH, POSITIONS
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, ViTConfig

ACTIVATIONS = {
  "gelu": "exact",
  "gelu_new": "tanh",
  "gelu_pytorch_tanh": "tanh",
  "quick_gelu": "quick",
}
# What masked-image pretraining puts in the place of patches.
_IGNORED = ("embeddings.mask_token", "vit.embeddings.mask_token")
# A classifier does not read what a pooler makes of the class token.
_POOLER = ("pooler.dense.*", "vit.pooler.dense.*")


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert a ViT: logits of its classifier, or features of its pooler.

  Args:
    config: its config.json.
    arrays: those of its file, with "vit." before the names or without.
    where: what to call it in messages.

  Raises:
    BackboneError: for a model that is not exactly such a ViT.
  """
  fields = Fields(config, where)
  has_head = "classifier.weight" in arrays or "classifier.bias" in arrays
  ignored = (*_IGNORED, *_POOLER) if has_head else _IGNORED
  weights = Weights(arrays, where, ignored)
  prefix = "vit." if any(name.startswith("vit.") for name in arrays) else ""
  vit = _config(fields, weights, prefix, arrays, where)
  converted: dict[str, np.ndarray] = {
    **_embeddings(weights, f"{prefix}embeddings.", vit),
    **_norm(weights, f"{prefix}layernorm", "Transformer/encoder_norm", vit),
  }
  has_bias = fields.flag("qkv_bias", True)
  for i in range(vit.depth):
    converted |= _block(
      weights, f"{prefix}encoder.layer.{i}.", i, vit, has_bias
    )
  if vit.representation_size:
    shape = (vit.representation_size, vit.width)
    converted |= _linear(weights, f"{prefix}pooler.dense", "pre_logits", shape)
  if vit.num_classes:
    shape = (vit.num_classes, vit.representation_size or vit.width)
    converted |= _linear(weights, "classifier", "head", shape)
  weights.done()
  half = (0.5, 0.5, 0.5)
  return Converted(
    config=vit, arrays=converted, image_mean=half, image_std=half
  )


def _config(
  fields: Fields, weights: Weights, prefix: str, arrays: Arrays, where: str
) -> ViTConfig:
  fields.require("num_channels", 3, "images have three colours", 3)
  width = fields.int("hidden_size", 1, 16_384)
  pooled = 0
  if weights.has(f"{prefix}pooler.dense.weight"):
    fields.require("pooler_act", "tanh", "that of ViT's pre_logits", "tanh")
    pooled = fields.int("pooler_output_size", 1, 16_384, width)
  # transformers counts the names of id2label, which need not be there.
  head = [n for n in ("classifier.weight", "classifier.bias") if n in arrays]
  classes = arrays[head[0]].shape[0] if head and arrays[head[0]].ndim else 0
  return vit_config(
    where,
    width=width,
    depth=fields.int("num_hidden_layers", 1, MAX_DEPTH),
    mlp_dim=fields.int("intermediate_size", 1, 65_536),
    num_heads=fields.int("num_attention_heads", 1, 256),
    patch_size=fields.size("patch_size", 1, 256),
    image_size=fields.size("image_size", 1, MAX_IMAGE_SIZE),
    num_classes=classes,
    representation_size=pooled,
    gelu=fields.choice("hidden_act", ACTIVATIONS),
    layer_norm_epsilon=fields.float("layer_norm_eps", 0, 1e-2),
    position_resize="bicubic",
  )


def _embeddings(weights: Weights, name: str, vit: ViTConfig) -> Arrays:
  d, p = vit.width, vit.patch_size
  patches = f"{name}patch_embeddings.projection"
  kernel = weights.take(f"{patches}.weight", (d, 3, p, p))
  return {
    "cls": weights.take(f"{name}cls_token", (1, 1, d)),
    POSITIONS: weights.take(
      f"{name}position_embeddings", (1, 1 + vit.num_patches, d)
    ),
    "embedding/kernel": fold.conv_kernel(kernel),
    "embedding/bias": weights.take(f"{patches}.bias", (d,)),
  }


def _block(
  weights: Weights, name: str, i: int, vit: ViTConfig, has_bias: bool
) -> Arrays:
  """The arrays of one block; `has_bias` is of query, key and value."""
  d, h = vit.width, vit.num_heads
  block = f"{BLOCK}{i}"
  attention = f"{block}/MultiHeadDotProductAttention_0"
  arrays: dict[str, np.ndarray] = {}
  for part in ("query", "key", "value"):
    source = f"{name}attention.attention.{part}"
    weight = weights.take(f"{source}.weight", (d, d))
    bias = np.zeros(d, np.float32)
    if has_bias:
      bias = weights.take(f"{source}.bias", (d,))
    arrays[f"{attention}/{part}/kernel"] = fold.heads_kernel(weight, h)
    arrays[f"{attention}/{part}/bias"] = fold.heads_bias(bias, h)
  out = f"{name}attention.output.dense"
  weight = weights.take(f"{out}.weight", (d, d))
  arrays[f"{attention}/out/kernel"] = fold.out_kernel(weight, h)
  arrays[f"{attention}/out/bias"] = weights.take(f"{out}.bias", (d,))
  mlp, up, down = f"{block}/MlpBlock_0", (vit.mlp_dim, d), (d, vit.mlp_dim)
  return {
    **arrays,
    **_norm(weights, f"{name}layernorm_before", f"{block}/LayerNorm_0", vit),
    **_norm(weights, f"{name}layernorm_after", f"{block}/LayerNorm_1", vit),
    **_linear(weights, f"{name}intermediate.dense", f"{mlp}/Dense_0", up),
    **_linear(weights, f"{name}output.dense", f"{mlp}/Dense_1", down),
  }


def _norm(weights: Weights, name: str, ours: str, vit: ViTConfig) -> Arrays:
  shape = (vit.width,)
  return {
    f"{ours}/scale": weights.take(f"{name}.weight", shape),
    f"{ours}/bias": weights.take(f"{name}.bias", shape),
  }


def _linear(
  weights: Weights, name: str, ours: str, shape: tuple[int, int]
) -> Arrays:
  """A layer of `shape` (out, in)."""
  weight = weights.take(f"{name}.weight", shape)
  return {
    f"{ours}/kernel": fold.linear_kernel(weight),
    f"{ours}/bias": weights.take(f"{name}.bias", shape[:1]),
  }

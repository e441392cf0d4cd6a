"""SigLIP and SigLIP 2 of a fixed resolution: their vision towers.

No class token: a learned probe attends to the patches. The model of images and
texts and that of images alone are both read; of the first, the text tower is
left out.
"""

from collections.abc import Mapping
from typing import Any

from memory_vit.backbones.families import torch_layers, towers
from memory_vit.backbones.families.converted import Arrays, Converted, Weights
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import (
  MAX_MLP_DIM,
  Shape,
  transformers_shape,
  vit_config,
)
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig

_DEFAULTS = Shape(
  width=768,
  depth=12,
  num_heads=12,
  patch_size=16,
  image_size=224,
  layer_norm_epsilon=1e-6,
)
_ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "exact"}
# The text tower, and what compares texts with images; a buffer of old files.
_IGNORED = ("text_model.*", "logit_scale", "logit_bias", "*.position_ids")
_MODEL_TYPES = {
  "siglip": "both",
  "siglip_vision_model": "vision",
  "siglip2": "naflex",
  "siglip2_vision_model": "naflex",
}
# A classifier does not read what the probe gathers.
_HEAD = ("vision_model.head.*", "head.*")


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert `SiglipModel`, `SiglipVisionModel` or the classifier made of it.

  The outputs are what the probe gathers (`pooler_output`), or the logits of a
  classifier, which reads the mean of the patches.

  Args:
    config: of its config.json.
    arrays: of its files.
    where: what to call the source in messages.

  Raises:
    BackboneError: where the arrays are not exactly those of the configuration,
      or the model takes images of any shape (SigLIP 2 NaFlex), or has no head.
  """
  fields = Fields(config, where)
  kind = fields.choice("model_type", _MODEL_TYPES)
  if kind == "naflex":
    raise BackboneError(
      f"{where} is a SigLIP 2 for images of any shape (NaFlex), whose patches "
      "are a sequence with a mask: expected one of a fixed resolution, whose "
      "model_type is siglip."
    )
  section = fields.section("vision_config") if kind == "both" else fields
  classes = towers.classifier_width(arrays, where)
  vit = _config(section, where, classes)
  ignored = (*_IGNORED, *_HEAD) if classes else _IGNORED
  prefix = towers.prefix(arrays)
  weights = Weights(arrays, where, ignored)
  tree = _tree(weights, prefix, vit)
  weights.done()
  return Converted(
    config=vit,
    arrays=trees.flatten(tree),
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
  )


def _config(fields: Fields, where: str, classes: int) -> ViTConfig:
  if not classes:
    fields.require(
      "vision_use_head", True, "without it there is no pooled output", True
    )
  return vit_config(
    where,
    **transformers_shape(fields, _DEFAULTS),
    mlp_dim=fields.int("intermediate_size", 1, MAX_MLP_DIM, 3072),
    gelu=fields.choice("hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh"),
    class_tokens=0,
    pooling="gap" if classes else "map",
    num_classes=classes,
    position_resize="bicubic",
  )


def _tree(weights: Weights, prefix: str, vit: ViTConfig) -> Tree:
  d, n = vit.width, vit.num_patches
  positions = weights.take(
    f"{prefix}embeddings.position_embedding.weight", (n, d)
  )
  tree: Tree = {
    "embedding": torch_layers.patch_embedding(
      weights, f"{prefix}embeddings.patch_embedding", vit
    ),
    "Transformer": {
      "posembed_input": {"pos_embedding": positions[None]},
      **towers.blocks(weights, prefix, vit),
      "encoder_norm": torch_layers.layer_norm(
        weights, f"{prefix}post_layernorm", d
      ),
    },
  }
  if vit.pooling == "map":
    return {**tree, "MAPHead_0": _map_head(weights, f"{prefix}head", vit)}
  head = torch_layers.linear(weights, "classifier", d, vit.num_classes)
  return {**tree, "head": torch_layers.dense(head)}


def _map_head(weights: Weights, name: str, vit: ViTConfig) -> Tree:
  """Attention of a probe, whose projections torch keeps in one array."""
  d = vit.width
  qkv = torch_layers.split(
    torch_layers.Linear(
      weights.take(f"{name}.attention.in_proj_weight", (3 * d, d)),
      weights.take(f"{name}.attention.in_proj_bias", (3 * d,)),
    ),
    3,
  )
  out = torch_layers.linear(weights, f"{name}.attention.out_proj", d, d)
  return {
    "probe": weights.take(f"{name}.probe", (1, 1, d)),
    "MultiHeadDotProductAttention_0": torch_layers.attention(
      qkv, out, vit.num_heads
    ),
    "LayerNorm_0": torch_layers.layer_norm(weights, f"{name}.layernorm", d),
    "MlpBlock_0": towers.mlp(weights, f"{name}.mlp", vit),
  }

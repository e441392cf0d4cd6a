"""CLIP and OpenCLIP in the layout of transformers: their vision towers.

A LayerNorm in front of the blocks, patches without bias, a projection into the
space that images share with texts. Of a model of both, the text tower is left
out.
"""

from collections.abc import Mapping
from typing import Any

from memory_vit.backbones.families import torch_layers, towers
from memory_vit.backbones.families.converted import Arrays, Converted, Weights
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.shapes import (
  MAX_CLASSES,
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
  patch_size=32,
  image_size=224,
  layer_norm_epsilon=1e-5,
)
_ACTIVATIONS = {"quick_gelu": "quick", "gelu": "exact"}
_PROJECTION = "visual_projection"
# The text tower, and what compares texts with images; a buffer of old files.
_IGNORED = (
  "text_model.*",
  "text_projection.weight",
  "logit_scale",
  "*.position_ids",
)


def convert(config: Mapping[str, Any], arrays: Arrays, where: str) -> Converted:
  """Convert `CLIPModel`, `CLIPVisionModelWithProjection` or `CLIPVisionModel`.

  The outputs are the projected class token (`image_embeds`); of the last, which
  has no projection, the class token after the last LayerNorm (`pooler_output`).

  Args:
    config: of its config.json.
    arrays: of its files.
    where: what to call the source in messages.

  Raises:
    BackboneError: where the arrays are not exactly those of the configuration,
      or it has a classifier: that of transformers reads the mean of the patches
      before the last LayerNorm.
  """
  if "classifier.weight" in arrays:
    raise BackboneError(
      f"{where} has a classifier that reads the mean of the patches before the "
      "last LayerNorm, expected a CLIP without one: save the tower inside it "
      "(model.vision_model.save_pretrained) and load that."
    )
  fields = Fields(config, where)
  both = fields.choice("model_type", {"clip": True, "clip_vision_model": False})
  projected = _is_projected(config, arrays) or both
  vit = _config(fields, both, projected, where)
  weights = Weights(arrays, where, _IGNORED)
  tree = _tree(weights, towers.prefix(arrays), vit)
  weights.done()
  return Converted(config=vit, arrays=trees.flatten(tree))


def _is_projected(config: Mapping[str, Any], arrays: Arrays) -> bool:
  """Whether a tower alone has, or says that it has, a projection."""
  stated = config.get("architectures")
  named = isinstance(stated, list) and "CLIPVisionModelWithProjection" in stated
  return named or f"{_PROJECTION}.weight" in arrays


def _config(
  fields: Fields, both: bool, projected: bool, where: str
) -> ViTConfig:
  tower = _tower_fields(fields) if both else fields
  projection = fields.int("projection_dim", 1, MAX_CLASSES, 512)
  return vit_config(
    where,
    **transformers_shape(tower, _DEFAULTS),
    mlp_dim=tower.int("intermediate_size", 1, MAX_MLP_DIM, 3072),
    gelu=tower.choice("hidden_act", _ACTIVATIONS, "quick_gelu"),
    num_classes=projection if projected else 0,
    pre_norm=True,
    position_resize="bicubic",
  )


def _tower_fields(fields: Fields) -> Fields:
  """The fields of the tower; where both are there, those of the older name."""
  older = "vision_config_dict"
  return fields.section(older if fields.has(older) else "vision_config")


def _tree(weights: Weights, prefix: str, vit: ViTConfig) -> Tree:
  d, n = vit.width, vit.num_patches
  name = f"{prefix}embeddings"
  positions = weights.take(f"{name}.position_embedding.weight", (1 + n, d))
  tree: Tree = {
    "embedding": torch_layers.patch_embedding(
      weights, f"{name}.patch_embedding", vit, bias=False
    ),
    "cls": weights.take(f"{name}.class_embedding", (d,))[None, None],
    "Transformer": {
      "posembed_input": {"pos_embedding": positions[None]},
      # Misspelt in the files.
      "pre_norm": torch_layers.layer_norm(weights, f"{prefix}pre_layrnorm", d),
      **towers.blocks(weights, prefix, vit),
      "encoder_norm": torch_layers.layer_norm(
        weights, f"{prefix}post_layernorm", d
      ),
    },
  }
  if not vit.num_classes:
    return tree
  head = torch_layers.linear(
    weights, _PROJECTION, d, vit.num_classes, bias=False
  )
  return {**tree, "head": torch_layers.dense(head)}

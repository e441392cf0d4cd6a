"""CLIP and OpenCLIP in the layout of transformers: their vision towers.

They have a LayerNorm before the blocks, a patch embedding without bias, and a
projection into the space that images share with texts. Text towers are not
read. The outputs are the projected class token (`image_embeds`); without a
projection (`CLIPVisionModel`), the class token after the last LayerNorm.
"""

from memory_vit.backbones.families import table
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.siglip import BESIDE, BLOCKS, TOWER
from memory_vit.backbones.families.table import Arrays, Model, To
from memory_vit.backbones.families.vit_fields import (
  transformers_config,
  vit_field,
)
from memory_vit.errors import BackboneError

# {`model_type`: whether the model has a text tower}.
_TEXTS = {"clip": True, "clip_vision_model": False}
MODEL_TYPES = tuple(_TEXTS)
_DEFAULTS = {
  "width": 768, "depth": 12, "mlp_dim": 3072, "num_heads": 12, "patch_size": 32,
  "image_size": 224, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_ACTIVATIONS = {"quick_gelu": "quick", "gelu": "exact"}
_PROJECTION = "visual_projection"


def read(fields: Fields, arrays: Arrays) -> Model:
  """Read `CLIPModel`, `CLIPVisionModelWithProjection` or `CLIPVisionModel`."""
  if "classifier.weight" in arrays:
    raise BackboneError(
      f"{fields.where} has a classifier that takes the mean of the patches "
      "before the last LayerNorm. Expected a CLIP without a classifier: save "
      "its image tower (model.vision_model.save_pretrained) and load that copy."
    )
  has_texts = fields.choice("model_type", _TEXTS)
  projected = (
    has_texts
    or f"{_PROJECTION}.weight" in arrays
    or "CLIPVisionModelWithProjection" in fields.names("architectures")
  )
  width = vit_field(fields, "num_classes", "projection_dim", 512)
  if has_texts:
    # transformers prefers the older `vision_config_dict` to `vision_config`.
    older = "vision_config_dict"
    fields = fields.section(older if fields.has(older) else "vision_config")
  config = transformers_config(
    fields,
    _DEFAULTS,
    gelu=fields.choice("hidden_act", _ACTIVATIONS, "quick_gelu"),
    num_classes=width if projected else 0,
    pre_norm=True,
    position_resize="bicubic",
  )
  d, n = config.width, config.num_patches
  tower = {
    "embeddings.class_embedding": To(table.CLASS, shape=(d,)),
    "embeddings.position_embedding.weight": To(
      table.POSITIONS, shape=(1 + n, d)
    ),
    "embeddings.patch_embedding": To(table.PATCHES, bias=False),
    "pre_layrnorm": table.PRE_NORM,  # the files misspell "layernorm"
    **BLOCKS,
    "post_layernorm": table.LAST_NORM,
  }
  return Model(
    config=config,
    table={
      **table.prefixed(TOWER, tower, arrays),
      _PROJECTION: To(table.HEAD, bias=False),
    },
    ignored=(*BESIDE, "text_projection.weight"),
  )

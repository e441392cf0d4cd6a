"""SigLIP and SigLIP 2 of a fixed resolution: their vision towers.

A learned probe attends to the patches; there is no class token. Text towers are
not read. The outputs are those of the probe (`pooler_output`), or the logits of
a classifier, which takes the mean of the patches.
"""

from memory_vit.backbones.families import table
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model, Table, To
from memory_vit.backbones.families.vit_fields import (
  transformers_config,
  width_of,
)

TOWER = "vision_model."
# Table rows for the blocks of the image towers of SigLIP and CLIP.
BLOCKS: Table = {
  "encoder.layers.{l}.layer_norm1": table.NORM_1,
  "encoder.layers.{l}.self_attn.q_proj": table.QUERY,
  "encoder.layers.{l}.self_attn.k_proj": table.KEY,
  "encoder.layers.{l}.self_attn.v_proj": table.VALUE,
  "encoder.layers.{l}.self_attn.out_proj": table.OUT,
  "encoder.layers.{l}.layer_norm2": table.NORM_2,
  "encoder.layers.{l}.mlp.fc1": table.UP,
  "encoder.layers.{l}.mlp.fc2": table.DOWN,
}
# Arrays to ignore: the text tower, the similarity scale, and a buffer that old
# files have.
BESIDE = ("text_model.*", "logit_scale", "*.position_ids")

# {`model_type`: whether the model has a text tower}.
_TEXTS = {"siglip": True, "siglip_vision_model": False}
MODEL_TYPES = tuple(_TEXTS)
_DEFAULTS = {
  "width": 768, "depth": 12, "mlp_dim": 3072, "num_heads": 12, "patch_size": 16,
  "image_size": 224, "layer_norm_epsilon": 1e-6,
}  # fmt: skip
_ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "exact"}
# torch stores query, key and value projections of the probe in one array.
_PROBE: Table = {
  "head.probe": table.PROBE,
  "head.attention.in_proj_": To(table.PROBE_QKV),
  "head.attention.out_proj": table.PROBE_OUT,
  "head.layernorm": table.PROBE_NORM,
  "head.mlp.fc1": table.PROBE_UP,
  "head.mlp.fc2": table.PROBE_DOWN,
}


def read(fields: Fields, arrays: Arrays) -> Model:
  """Read a SigLIP model, its image tower, or a classifier on this tower."""
  if fields.choice("model_type", _TEXTS):
    fields = fields.section("vision_config")
  classes = width_of(arrays, "classifier", "num_classes", fields.where)
  if not classes:
    fields.require(
      "vision_use_head", True, "other models have no pooled output", True
    )
  config = transformers_config(
    fields,
    _DEFAULTS,
    gelu=fields.choice("hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh"),
    class_tokens=0,
    pooling="gap" if classes else "map",
    num_classes=classes,
    position_resize="bicubic",
  )
  tower = {
    "embeddings.position_embedding.weight": To(
      table.POSITIONS, shape=(config.num_patches, config.width)
    ),
    "embeddings.patch_embedding": table.PATCHES,
    **BLOCKS,
    "post_layernorm": table.LAST_NORM,
    **_PROBE,
  }
  # Ignore the probe if there is a classifier, which does not use the probe.
  probe = (f"{TOWER}head.*", "head.*") if classes else ()
  return Model(
    config=config,
    table={**table.prefixed(TOWER, tower, arrays), "classifier": table.HEAD},
    ignored=(*BESIDE, "logit_bias", *probe),
  )

"""`ViTModel` and `ViTForImageClassification` of transformers.

The outputs are the logits of the classifier; without a classifier, the features
of the pooler; and without a pooler, the class token.
"""

from memory_vit.backbones.families import table
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model, Table, To
from memory_vit.backbones.families.vit_fields import (
  transformers_config,
  vit_field,
  width_of,
)

MODEL_TYPES = ("vit",)
ACTIVATIONS = {
  "gelu": "exact",
  "gelu_new": "tanh",
  "gelu_pytorch_tanh": "tanh",
  "quick_gelu": "quick",
}
FIELDS = dict.fromkeys((
  *("width", "depth", "mlp_dim", "num_heads", "patch_size", "image_size"),
  "layer_norm_epsilon",
))  # fmt: skip
# Name of the mask token, which is ignored: only pretraining uses it.
MASK = "embeddings.mask_token"
# Arrays to ignore if there is a classifier, which does not use the pooler.
_POOLER = ("pooler.dense.*", "vit.pooler.dense.*")


def trunk(qkv_bias: bool) -> Table:
  """Return the table rows that ViT and I-JEPA have in common."""
  block = "encoder.layer.{l}"
  return {
    "embeddings.position_embeddings": table.POSITIONS,
    "embeddings.patch_embeddings.projection": table.PATCHES,
    f"{block}.layernorm_before": table.NORM_1,
    f"{block}.attention.attention.query": To(table.QUERY, bias=qkv_bias),
    f"{block}.attention.attention.key": To(table.KEY, bias=qkv_bias),
    f"{block}.attention.attention.value": To(table.VALUE, bias=qkv_bias),
    f"{block}.attention.output.dense": table.OUT,
    f"{block}.layernorm_after": table.NORM_2,
    f"{block}.intermediate.dense": table.UP,
    f"{block}.output.dense": table.DOWN,
    "layernorm": table.LAST_NORM,
  }


def rows(qkv_bias: bool) -> Table:
  """Return all rows except the classifier's."""
  return {
    "embeddings.cls_token": table.CLASS,
    **trunk(qkv_bias),
    "pooler.dense": table.PRE_LOGITS,
  }


def read(fields: Fields, arrays: Arrays) -> Model:
  """Read a ViT; its array names begin with "vit." if it has a classifier."""
  # Read the number of classes from the arrays, because config.json may lack it.
  classes = width_of(arrays, "classifier", "num_classes", fields.where)
  pooled = 0
  if not classes and any(n.endswith("pooler.dense.weight") for n in arrays):
    fields.require("pooler_act", "tanh", "the activation of pre_logits", "tanh")
    width = vit_field(fields, "width", "hidden_size")
    pooled = vit_field(
      fields, "representation_size", "pooler_output_size", width
    )
  config = transformers_config(
    fields,
    FIELDS,
    num_classes=classes,
    representation_size=pooled,
    gelu=fields.choice("hidden_act", ACTIVATIONS),
    position_resize="bicubic",
  )
  vit_rows = rows(fields.flag("qkv_bias", True))
  return Model(
    config=config,
    table={
      **table.prefixed("vit.", vit_rows, arrays), "classifier": table.HEAD
    },
    ignored=(MASK, f"vit.{MASK}", *(_POOLER if classes else ())),
  )  # fmt: skip

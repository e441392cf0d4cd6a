"""I-JEPA, as transformers writes it: a ViT without a class token.

The outputs are the mean of the patches after the last LayerNorm, on which its
authors evaluate it, or the logits of a classifier of this mean.
"""

from memory_vit.backbones.families import hf_vit, table
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model
from memory_vit.backbones.families.vit_fields import (
  transformers_config,
  width_of,
)

MODEL_TYPES = ("ijepa",)
_DEFAULTS = {
  "width": 768, "depth": 12, "mlp_dim": 3072, "num_heads": 12, "patch_size": 16,
  "image_size": 224, "layer_norm_epsilon": 1e-12,
}  # fmt: skip


def read(fields: Fields, arrays: Arrays) -> Model:
  """Read `IJepaModel` or `IJepaForImageClassification`."""
  config = transformers_config(
    fields,
    _DEFAULTS,
    gelu=fields.choice("hidden_act", hf_vit.ACTIVATIONS, "gelu"),
    class_tokens=0,
    pooling="gap",
    num_classes=width_of(arrays, "classifier", "num_classes", fields.where),
    position_resize="bicubic",
  )
  rows = hf_vit.trunk(fields.flag("qkv_bias", True))
  return Model(
    config=config,
    table={**table.prefixed("ijepa.", rows, arrays), "classifier": table.HEAD},
    ignored=(hf_vit.MASK, f"ijepa.{hf_vit.MASK}"),
  )

"""DINOv3 ViT, as transformers writes it.

It has rotary positions, registers, LayerScale, keys without bias, SwiGLU in the
largest models, and no head. The outputs are the class token after the last
LayerNorm (`pooler_output`).
"""

from memory_vit.backbones.families import table
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model, Table, To
from memory_vit.backbones.families.vit_fields import transformers_config

MODEL_TYPES = ("dinov3_vit",)
_DEFAULTS = {
  "width": 384, "depth": 12, "mlp_dim": 1536, "num_heads": 6, "patch_size": 16,
  "image_size": 224, "registers": 0, "layer_norm_epsilon": 1e-5,
  "rope_base": 100,
}  # fmt: skip


def read(fields: Fields, arrays: Arrays) -> Model:
  del arrays
  gated = fields.flag("use_gated_mlp", False)
  activation, mlp = ("silu", "SwiGLU") if gated else ("gelu", "an exact GELU")
  fields.require("hidden_act", activation, mlp, "gelu")
  config = transformers_config(
    fields,
    _DEFAULTS,
    mlp="swiglu" if gated else "gelu",
    gelu="exact",
    positions="rope",
  )
  block, mlp_bias = "layer.{l}", fields.flag("mlp_bias", True)
  rows: Table = {
    "embeddings.cls_token": table.CLASS,
    "embeddings.register_tokens": table.REGISTERS,
    "embeddings.patch_embeddings": table.PATCHES,
    f"{block}.norm1": table.NORM_1,
    f"{block}.attention.q_proj": To(
      table.QUERY, bias=fields.flag("query_bias", True)
    ),
    f"{block}.attention.k_proj": To(
      table.KEY, bias=fields.flag("key_bias", False)
    ),
    f"{block}.attention.v_proj": To(
      table.VALUE, bias=fields.flag("value_bias", True)
    ),
    f"{block}.attention.o_proj": To(
      table.OUT,
      bias=fields.flag("proj_bias", True),
      scale=f"{block}.layer_scale1.lambda1",
    ),
    f"{block}.norm2": table.NORM_2,
    f"{block}.mlp.gate_proj": To(table.GATE, bias=mlp_bias),
    f"{block}.mlp.up_proj": To(table.UP, bias=mlp_bias),
    f"{block}.mlp.down_proj": To(
      table.DOWN, bias=mlp_bias, scale=f"{block}.layer_scale2.lambda1"
    ),
    "norm": table.LAST_NORM,
  }
  ignored = ("embeddings.mask_token",)  # used only in pretraining
  return Model(config=config, table=rows, ignored=ignored)

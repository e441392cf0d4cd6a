"""DINOv2, with and without registers, as transformers writes it.

It has patches of 14 pixels, LayerScale, an exact GELU or, in the largest model,
SwiGLU, and no head. Registers have no positions. The outputs are the class
token after the last LayerNorm (`pooler_output`).
"""

from memory_vit.backbones.families import table
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model, Table, To
from memory_vit.backbones.families.vit_fields import (
  transformers_config,
  vit_field,
)
from memory_vit.errors import BackboneError

_WITH_REGISTERS = {"dinov2": False, "dinov2_with_registers": True}
MODEL_TYPES = tuple(_WITH_REGISTERS)
_BLOCK = "encoder.layer.{l}"
_SCALE_1, _SCALE_2 = (f"{_BLOCK}.layer_scale{i}.lambda1" for i in (1, 2))
_MLP: Table = {
  f"{_BLOCK}.mlp.fc1": table.UP,
  f"{_BLOCK}.mlp.fc2": To(table.DOWN, scale=_SCALE_2),
}
_SWIGLU: Table = {
  f"{_BLOCK}.mlp.weights_in": To((table.GATE, table.UP)),
  f"{_BLOCK}.mlp.weights_out": To(table.DOWN, scale=_SCALE_2),
}


def read(fields: Fields, arrays: Arrays) -> Model:
  if "classifier.weight" in arrays:
    raise BackboneError(
      f"{fields.where} has a classifier that takes the class token, "
      "concatenated with the mean patch token. Expected DINOv2 without a head: "
      "save its backbone (model.base_model.save_pretrained) and load that copy."
    )
  has_registers = fields.choice("model_type", _WITH_REGISTERS)
  defaults = {
    "width": 768, "depth": 12, "num_heads": 12, "image_size": 224,
    "patch_size": 16 if has_registers else 14, "layer_norm_epsilon": 1e-6,
    **({"registers": 4} if has_registers else {}),
  }  # fmt: skip
  hidden = int(
    vit_field(fields, "width", "hidden_size", 768)
    * fields.number("mlp_ratio", 0.01, 64, 4)
  )
  swiglu = fields.flag("use_swiglu_ffn", False)
  if not swiglu:
    fields.require("hidden_act", "gelu", "an exact GELU", "gelu")
  config = transformers_config(
    fields,
    defaults,
    mlp_dim=_swiglu_width(hidden) if swiglu else hidden,
    mlp="swiglu" if swiglu else "gelu",
    gelu="exact",
    position_resize="bicubic_antialias" if has_registers else "bicubic",
  )
  qkv_bias = fields.flag("qkv_bias", True)
  attention = f"{_BLOCK}.attention.attention"
  rows: Table = {
    "embeddings.cls_token": table.CLASS,
    "embeddings.register_tokens": table.REGISTERS,
    "embeddings.position_embeddings": table.POSITIONS,
    "embeddings.patch_embeddings.projection": table.PATCHES,
    f"{_BLOCK}.norm1": table.NORM_1,
    f"{attention}.query": To(table.QUERY, bias=qkv_bias),
    f"{attention}.key": To(table.KEY, bias=qkv_bias),
    f"{attention}.value": To(table.VALUE, bias=qkv_bias),
    f"{_BLOCK}.attention.output.dense": To(table.OUT, scale=_SCALE_1),
    f"{_BLOCK}.norm2": table.NORM_2,
    **(_SWIGLU if swiglu else _MLP),
    "layernorm": table.LAST_NORM,
  }
  ignored = ("embeddings.mask_token",)  # used only in pretraining
  return Model(config=config, table=rows, ignored=ignored)


def _swiglu_width(hidden: int) -> int:
  """Return 2/3 of `hidden`, rounded up to a multiple of 8."""
  # SwiGLU has three matrices, and a plain MLP has two. With 2/3 of the width of
  # the plain MLP, SwiGLU has the same number of weights.
  return (int(hidden * 2 / 3) + 7) // 8 * 8

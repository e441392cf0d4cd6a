"""DINOv3 ViT, as timm writes it: `vit_*_patch16_dinov3[_qkvb]`.

The model of `dinov3` under other names: query, key and value share one array,
and have separate biases. The outputs are the mean of the patches, or the class
token if `global_pool` is "token", after the last LayerNorm; or the logits of a
head.
"""

import re

from memory_vit.backbones.families import table
from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays, Model, Table, To
from memory_vit.backbones.families.timm_arguments import model_args
from memory_vit.backbones.families.timm_positions import input_side
from memory_vit.backbones.families.vit_fields import (
  vit_config,
  vit_field,
  width_of,
)
from memory_vit.model.vit_config import MAX_IMAGE_SIZE

# {size: (width, depth, heads, whether the MLP has a gate)}.
_SIZES = {
  "tiny": (192, 12, 3, False),
  "small": (384, 12, 6, False),
  "small_plus": (384, 12, 6, True),
  "base": (768, 12, 12, False),
  "large": (1024, 24, 16, False),
  "huge_plus": (1280, 32, 20, True),
  "7b": (4096, 40, 32, True),
}
NAME = re.compile(rf"vit_({'|'.join(_SIZES)})_patch16_dinov3(_qkvb)?$")
_POOLING = {"avg": "gap", "token": "tok"}
# Supported keys of `model_args`. No published configuration has other keys.
_READ = {
  *("embed_dim", "depth", "num_heads", "patch_size", "num_reg_tokens"),
  *("global_pool", "num_classes", "in_chans", "img_size", "dynamic_img_size"),
}


def read(fields: Fields, arrays: Arrays) -> Model:
  size, biased = NAME.findall(fields.text("architecture"))[0]
  width, depth, heads, gated = _SIZES[size]
  args = model_args(fields, _READ)
  args.require("in_chans", 3, "memory_vit takes RGB images", 3)
  pools = {name: name for name in _POOLING}
  first = "fc1_x" if gated else "fc1"
  config = vit_config(
    fields.where,
    width=vit_field(args, "width", "embed_dim", width),
    depth=vit_field(args, "depth", "depth", depth),
    num_heads=vit_field(args, "num_heads", "num_heads", heads),
    mlp_dim=width_of(
      arrays, f"blocks.0.mlp.{first}", "mlp_dim", fields.where
    ) or 4 * width,
    patch_size=vit_field(args, "patch_size", "patch_size", 16),
    # No array has a shape that tells the image size: the positions are rotary.
    image_size=args.size("img_size", 1, MAX_IMAGE_SIZE)
    if args.has("img_size")
    else input_side(fields.section("pretrained_cfg")),
    num_classes=vit_field(fields, "num_classes", "num_classes"),
    gelu="exact",
    layer_norm_epsilon=1e-5,
    registers=vit_field(args, "registers", "num_reg_tokens", 4),
    positions="rope",
    mlp="swiglu" if gated else "gelu",
    pooling=args.choice(
      "global_pool", _POOLING, fields.choice("global_pool", pools, "avg")
    ),
  )  # fmt: skip
  block, d = "blocks.{l}", config.width
  biases = {
    f"{block}.attn.q_bias": To(f"{table.QUERY}/bias", shape=(d,)),
    f"{block}.attn.v_bias": To(f"{table.VALUE}/bias", shape=(d,)),
  }
  rows: Table = {
    "patch_embed.proj": table.PATCHES,
    "cls_token": table.CLASS,
    "reg_token": table.REGISTERS,
    f"{block}.norm1": table.NORM_1,
    f"{block}.attn.qkv": To(table.QKV, bias=False),
    **(biases if biased else {}),
    f"{block}.attn.proj": To(table.OUT, scale=f"{block}.gamma_1"),
    f"{block}.norm2": table.NORM_2,
    f"{block}.mlp.fc1_g": table.GATE,
    f"{block}.mlp.{first}": table.UP,
    f"{block}.mlp.fc2": To(table.DOWN, scale=f"{block}.gamma_2"),
    "norm": table.LAST_NORM,
    "head": table.HEAD,
  }
  return Model(config=config, table=rows)

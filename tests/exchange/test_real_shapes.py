"""The published shapes: names and sizes of real models become our tree."""

import contextlib

import library_models  # noqa: F401  transformers comes after it
import numpy as np
import pytest
import timm
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from memory_vit.backbones import layouts
from memory_vit.backbones.families import detect, fold
from memory_vit.model.vit_config import MAX_IMAGE_SIZE

DINOV2 = {
  "S": {"hidden_size": 384, "num_attention_heads": 6},
  "B": {},
  "L": {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
  },
  "g": {
    "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24,
    "use_swiglu_ffn": True,
  },
}  # fmt: skip
DINOV3 = {
  "S/16": {},
  "B/16": {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
  },
  "H+/16": {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 20, "use_gated_mlp": True, "hidden_act": "silu",
  },
  "7B/16": {
    "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 40,
    "num_attention_heads": 32, "use_gated_mlp": True, "hidden_act": "silu",
    "query_bias": False, "value_bias": False,
  },
}  # fmt: skip
SIGLIP = {
  "B/16": {},
  "L/16 at 384": {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 384,
  },
  "So400m/14 at 384": {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
  },
  "g/16 at 384": {
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 40,
    "num_attention_heads": 16, "image_size": 384,
  },
}  # fmt: skip
CLIP = {
  "B/32": {},
  "L/14 at 336": {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
    "projection_dim": 768,
  },
  "bigG/14": {
    "hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 16, "patch_size": 14, "hidden_act": "gelu",
    "projection_dim": 1280,
  },
}  # fmt: skip
IJEPA = {
  "H/14": {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 16, "patch_size": 14,
  },
}  # fmt: skip
AT_518 = {"image_size": 518, "patch_size": 14}
TRANSFORMERS = [
  *(("Dinov2Model", k, {**AT_518, **v}) for k, v in DINOV2.items()),
  *(
    ("Dinov2WithRegistersModel", k, {**AT_518, **v}) for k, v in DINOV2.items()
  ),
  *(
    ("DINOv3ViTModel", k, {"num_register_tokens": 4, **v})
    for k, v in DINOV3.items()
  ),
  *(("IJepaModel", k, v) for k, v in IJEPA.items()),
  *(("SiglipVisionModel", k, v) for k, v in SIGLIP.items()),
  *(("CLIPVisionModelWithProjection", k, v) for k, v in CLIP.items()),
]
TIMM = [
  "vit_base_patch16_224",
  "vit_large_patch14_reg4_dinov2",
  "vit_giant_patch14_dinov2",
  "vit_so400m_patch14_siglip_384",
  "vit_gigantic_patch14_clip_quickgelu_224",
  "vit_mediumd_patch16_reg4_gap_384",
  "deit3_huge_patch14_224",
  "vit_tiny_patch16_dinov3_qkvb",
  "vit_small_patch16_dinov3",
  "vit_small_plus_patch16_dinov3",
  "vit_base_patch16_dinov3_qkvb",
  "vit_large_patch16_dinov3",
  "vit_huge_plus_patch16_dinov3",
  "vit_7b_patch16_dinov3",
]


@pytest.fixture(autouse=True)
def no_values(monkeypatch):
  """Arrays here have shapes alone; folding would fill them."""
  monkeypatch.setattr(fold, "fold_layer_scale", lambda k, b, scale: (k, b))


def arrays_of(state):
  """Names and shapes as arrays that take no memory."""
  zero = np.zeros((), np.float32)
  return {
    name: np.broadcast_to(zero, tuple(tensor.shape))
    for name, tensor in state.items()
  }


def require_our_tree(config, arrays):
  converted = detect.convert(config, arrays, "config.json")
  expected = layouts.expected_shapes(converted.config)
  assert {n: a.shape for n, a in converted.arrays.items()} == {
    n: a.shape for n, a in expected.items()
  }
  assert converted.config.image_size <= MAX_IMAGE_SIZE
  return converted.config


@pytest.mark.parametrize(
  ("kind", "fields"),
  [(kind, fields) for kind, _, fields in TRANSFORMERS],
  ids=[f"{kind} {name}" for kind, name, _ in TRANSFORMERS],
)
def test_published_shapes_of_transformers_are_converted(kind, fields):
  model_class = getattr(transformers, kind)
  config = model_class.config_class(**fields)
  with torch.device("meta"):
    model = model_class(config)
  written = revert_weight_conversion(model, model.state_dict())
  vit = require_our_tree(config.to_dict(), arrays_of(written))
  assert vit.head_dim == fields.get("hidden_size", vit.width) // vit.num_heads


@pytest.mark.parametrize("name", TIMM)
def test_published_shapes_of_timm_are_converted(name):
  with torch.device("meta"), contextlib.suppress(NotImplementedError):
    model = timm.create_model(name)
  config = {
    "architecture": name,
    "num_classes": model.num_classes,
    "pretrained_cfg": {"input_size": [3, 224, 224]},
  }
  vit = require_our_tree(config, arrays_of(model.state_dict()))
  assert (vit.num_heads, vit.depth) == (
    model.blocks[0].attn.num_heads,
    len(model.blocks),
  )

"""How families of ViTs differ, as fields of `ViTConfig`."""

import pytest
from marks import NIGHTLY

FAMILIES = {
  "hf vit": {"gelu": "exact", "layer_norm_epsilon": 1e-12},
  "timm, mean": {
    "gelu": "exact", "registers": 1, "pooling": "gap",
    "norm_after_pooling": True,
  },
  "dinov2": {
    "gelu": "exact", "registers": 3, "mlp": "swiglu", "num_classes": 0,
  },
  "dinov3": {
    "gelu": "exact", "registers": 2, "positions": "rope",
    "layer_norm_epsilon": 1e-5, "num_classes": 0,
  },
  "siglip": {"class_tokens": 0, "pooling": "map", "num_classes": 0},
  "mean": {"class_tokens": 0, "pooling": "gap"},
  "clip": {"gelu": "quick", "layer_norm_epsilon": 1e-2, "pre_norm": True},
  "two classes": {"class_tokens": 2},
}  # fmt: skip
# The fast tests have those that differ most from the published ViT.
QUICK = ("dinov3", "siglip")
# Each of their parts is in another family as well.
REPEATED = ("hf vit", "mean")


def _marks(name):
  if name in QUICK:
    return ()
  return NIGHTLY if name in REPEATED else pytest.mark.slow


FEW_FIRST = [pytest.param(name, marks=_marks(name)) for name in FAMILIES]
# Where two of them compile for seconds.
ONE_FIRST = [
  pytest.param(name, marks=_marks(name) or pytest.mark.slow)
  if name != QUICK[0]
  else name
  for name in FAMILIES
]

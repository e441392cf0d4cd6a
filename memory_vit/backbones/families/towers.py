"""Blocks of the vision towers of CLIP and SigLIP, which have the same names."""

from memory_vit.backbones.families import torch_layers
from memory_vit.backbones.families.converted import Arrays, Weights
from memory_vit.backbones.families.shapes import MAX_CLASSES
from memory_vit.errors import BackboneError
from memory_vit.model.trees import Tree
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime.messages import brief

_PREFIX = "vision_model."


def prefix(arrays: Arrays) -> str:
  """The prefix of the names of the tower.

  A tower that transformers 5 wrote alone has nothing there.
  """
  return _PREFIX if any(name.startswith(_PREFIX) for name in arrays) else ""


def classifier_width(arrays: Arrays, where: str) -> int:
  """The number of classes; 0 where there is no classifier."""
  if "classifier.weight" not in arrays:
    return 0
  shape = arrays["classifier.weight"].shape
  if len(shape) != 2 or not 1 <= shape[0] <= MAX_CLASSES:
    raise BackboneError(
      f"{where}: classifier.weight has the shape {brief(shape)}, expected "
      f"(classes, width) with at most {MAX_CLASSES:,} classes."
    )
  return shape[0]


def blocks(weights: Weights, start: str, vit: ViTConfig) -> Tree:
  """All blocks; `start` is what stands before the names of the tower."""
  return {
    f"encoderblock_{i}": _block(weights, f"{start}encoder.layers.{i}", vit)
    for i in range(vit.depth)
  }


def mlp(weights: Weights, name: str, vit: ViTConfig) -> Tree:
  """The MLP of a block, and of the head of SigLIP."""
  d, hidden = vit.width, vit.mlp_dim
  return torch_layers.mlp(
    torch_layers.linear(weights, f"{name}.fc1", d, hidden),
    torch_layers.linear(weights, f"{name}.fc2", hidden, d),
  )


def _block(weights: Weights, name: str, vit: ViTConfig) -> Tree:
  d = vit.width
  *qkv, out = (
    torch_layers.linear(weights, f"{name}.self_attn.{part}", d, d)
    for part in ("q_proj", "k_proj", "v_proj", "out_proj")
  )
  return {
    "LayerNorm_0": torch_layers.layer_norm(weights, f"{name}.layer_norm1", d),
    "MultiHeadDotProductAttention_0": torch_layers.attention(
      qkv, out, vit.num_heads
    ),
    "LayerNorm_1": torch_layers.layer_norm(weights, f"{name}.layer_norm2", d),
    "MlpBlock_0": mlp(weights, f"{name}.mlp", vit),
  }

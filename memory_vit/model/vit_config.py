"""Configuration of a Vision Transformer, and the table of published variants.

Dimension letters, used in every signature and docstring of this package:

  b  images in a batch          n  patches of an image, or summary tokens
  s  tokens in a sequence; in the backbone stream class tokens, registers and
     patches, in this order: n + 1 in the published ViT
  t  tasks in one pass          m  memory cells of a task, per layer
  p  parents: the maximum number of other tasks that a task attends to
  d  width                      h  attention heads (k = d / h, width of a head)
  l  layers                     r  width of a bottleneck, or of a side stream
  c  classes of a task          c0 outputs of the backbone
  g  tasks of a pass with side streams of one kind

An image is (side, side, 3). Annotations of jaxtyping, `Float[Array, "b s d"]`,
use these letters; the tests check them at every call.
"""

import dataclasses
import math
import re
from typing import Any

from memory_vit.errors import ConfigError
from memory_vit.runtime.dtypes import Precision

# Prefix of the name of a randomly initialized backbone, such as "random:B/32".
RANDOM = "random:"
# Limits of an image's side, in pixels: at 2,048, a ViT-B/16 has 16,384 tokens,
# whose attention takes 13 GB per image.
MAX_IMAGE_SIZE = 2_048
MAX_RESIZE = 4_096
# Maximum number of patches with RoPE: (MAX_IMAGE_SIZE / 8)**2, which is enough
# for patches of 8 x 8 pixels. Without RoPE, the table of position embeddings
# limits the number.
MAX_ROTATED_PATCHES = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
  """Configuration of a ViT: all that defines its computation except weights.

  Attributes:
    width: d, the width of a token.
    depth: l, the number of blocks.
    mlp_dim: the hidden width of a block's MLP.
    num_heads: h, the number of attention heads.
    patch_size: the side of a square patch, in pixels.
    image_size: the side of the square input image, in pixels.
    num_classes: the number of outputs of the original head; 0 without a head,
      so that the model returns its features.
    representation_size: width of `pre_logits`, the tanh layer before the head
      of the original ImageNet-21k checkpoints; 0 without this layer.
    gelu: "tanh", the approximation that vit_jax and big_vision train with;
      "exact", for most weights that were trained in PyTorch; or "quick",
      x sigmoid(1.702 x), of OpenAI's CLIP.
    layer_norm_epsilon: the epsilon of every LayerNorm.
    class_tokens: the number of class tokens in front of the sequence, 0 to 2.
    registers: the number of tokens without position between class tokens and
      patches.
    positions: "learned" adds a table whose first rows belong to class tokens;
      "rope" rotates queries and keys of patches (DINOv3).
    rope_base: the period of the slowest rotation.
    position_resize: how the table is interpolated for another image size:
      "bilinear" with aligned corners, as vit_jax; "bicubic" without
      antialiasing, as transformers; "bicubic_antialias", as timm.
    pre_norm: whether a LayerNorm precedes the blocks (CLIP).
    mlp: "gelu", with two layers, or "swiglu", with a gate.
    pooling: how tokens become features: "tok" takes the first class token,
      "gap" the mean of the patches, and "map" the attention of a learned probe
      to all tokens (SigLIP).
    norm_after_pooling: whether the last LayerNorm comes after the mean instead
      of before it (`fc_norm` in timm).
    dtype: compute dtype, "float32" or "bfloat16", of the operands of products
      (see `products.einsum`) and of the tokens after each half of a block.
      Everything else is float32.
    platform: the platform for which programs are compiled, "cpu", "gpu" or
      "tpu"; "" is the platform of JAX's first device.
  """

  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  patch_size: int
  image_size: int = 224
  num_classes: int = 0
  representation_size: int = 0
  gelu: str = "tanh"
  layer_norm_epsilon: float = 1e-6
  class_tokens: int = 1
  registers: int = 0
  positions: str = "learned"
  rope_base: float = 100.0
  position_resize: str = "bilinear"
  pre_norm: bool = False
  mlp: str = "gelu"
  pooling: str = "tok"
  norm_after_pooling: bool = False
  dtype: str = "float32"
  platform: str = ""

  def __post_init__(self) -> None:
    if self.width % self.num_heads:
      raise ConfigError(
        f"width {self.width} is not a multiple of num_heads {self.num_heads}."
      )
    if self.image_size < 1 or self.image_size % self.patch_size:
      nearest = max(1, round(self.image_size / self.patch_size))
      raise ConfigError(
        f"image_size {self.image_size} is not a multiple of the patch size "
        f"{self.patch_size}: use {nearest * self.patch_size}."
      )
    for field, choices in _CHOICES.items():
      if getattr(self, field) not in choices:
        raise ConfigError(
          f"{field} is {getattr(self, field)!r}, expected one of "
          f"{', '.join(map(repr, choices))}."
        )
    self._require_tokens()

  def _require_tokens(self) -> None:
    if not 0 < self.layer_norm_epsilon < 1:
      raise ConfigError(
        f"layer_norm_epsilon is {self.layer_norm_epsilon}, expected a number "
        "between 0 and 1."
      )
    if not 0 <= self.class_tokens <= 2 or not 0 <= self.registers <= 64:
      raise ConfigError(
        f"class_tokens is {self.class_tokens} and registers is "
        f"{self.registers}, expected 0 to 2 class tokens and 0 to 64 registers."
      )
    if self.pooling == "tok" and not self.class_tokens:
      raise ConfigError(
        "pooling 'tok' needs a class token: class_tokens is 0, expected 1 or 2."
      )
    if self.norm_after_pooling and self.pooling != "gap":
      raise ConfigError(
        f"norm_after_pooling requires pooling 'gap', not {self.pooling!r}."
      )
    if not 1 < self.rope_base < 1e9:
      raise ConfigError(
        f"rope_base is {self.rope_base}, expected a number between 1 and 1e9."
      )
    if self.positions == "rope":
      if self.head_dim % 4:
        raise ConfigError(
          "positions 'rope' needs a head width (width / num_heads) that is a "
          f"multiple of 4, but the head width is {self.head_dim}."
        )
      if self.num_patches > MAX_ROTATED_PATCHES:
        raise ConfigError(
          f"positions 'rope' allows at most {MAX_ROTATED_PATCHES:,} patches, "
          f"but patch_size {self.patch_size} with image_size {self.image_size} "
          "gives more."
        )

  @property
  def num_patches(self) -> int:
    """n, the number of patches of an image."""
    return (self.image_size // self.patch_size) ** 2

  @property
  def summary_tokens(self) -> int:
    """n, the number of tokens that `VisionTransformer.summarize` returns."""
    return self.depth * (2 if self.class_tokens else 1)

  @property
  def head_dim(self) -> int:
    """The width of one attention head."""
    return self.width // self.num_heads

  @property
  def precision(self) -> Precision:
    """The dtype of products, and the platform that computes them."""
    return Precision(self.dtype, self.platform)

  @property
  def variant(self) -> str:
    """The published name, such as "B/32"; other shapes are spelled out."""
    for letter, shape in VARIANTS.items():
      if shape == (self.width, self.depth, self.mlp_dim, self.num_heads):
        return f"{letter}/{self.patch_size}"
    return (
      f"width{self.width}-depth{self.depth}-mlp{self.mlp_dim}"
      f"-heads{self.num_heads}/{self.patch_size}"
    )


_CHOICES = {
  "gelu": ("tanh", "exact", "quick"),
  "positions": ("learned", "rope"),
  "position_resize": ("bilinear", "bicubic", "bicubic_antialias"),
  "mlp": ("gelu", "swiglu"),
  "pooling": ("tok", "gap", "map"),
  "dtype": ("float32", "bfloat16"),
  "platform": ("", "cpu", "gpu", "tpu"),
}

# {name: (width, depth, mlp_dim, num_heads)}. So400m is from SigLIP; Micro, for
# tests and tiny images, is our own. Others are from the ViT and DeiT papers.
VARIANTS = {
  "Micro": (64, 4, 256, 4),
  "Ti": (192, 12, 768, 3),
  "S": (384, 12, 1536, 6),
  "B": (768, 12, 3072, 12),
  "L": (1024, 24, 4096, 16),
  "H": (1280, 32, 5120, 16),
  "So400m": (1152, 27, 4304, 16),
}


def vit_config(variant: str, **overrides: Any) -> ViTConfig:
  """Return the configuration of a variant such as "B/32".

  Args:
    variant: Ti, S, B, L, H, So400m or Micro, a slash, patch size in pixels.
    **overrides: the other fields of `ViTConfig`, such as `image_size`.

  Raises:
    ConfigError: if `variant` has another form, or a field is impossible.
  """
  match = re.fullmatch(r"(\w+)/(\d+)", variant)
  if not match or match[1] not in VARIANTS or int(match[2]) < 1:
    raise ConfigError(
      f"unknown variant {variant!r}: expected one of {', '.join(VARIANTS)}, a "
      "slash and a patch size, for example 'B/32'."
    )
  width, depth, mlp_dim, num_heads = VARIANTS[match[1]]
  return ViTConfig(
    width=width,
    depth=depth,
    mlp_dim=mlp_dim,
    num_heads=num_heads,
    patch_size=int(match[2]),
    **overrides,
  )


def square_side(patches: int) -> int:
  """Return the square root of `patches` if it is an integer, otherwise 0."""
  side = math.isqrt(patches)
  return side if side * side == patches else 0

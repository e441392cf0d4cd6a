"""The shape of a ViT, from the configuration of a stranger."""

from typing import Any, TypedDict

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.layouts import MAX_DEPTH
from memory_vit.errors import BackboneError, ConfigError
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, ViTConfig

# It may not speak of a model so large that its first array cannot be made. The
# widest published ViT has 4,096, with MLPs of 8,192.
MAX_WIDTH = 2**14
MAX_MLP_DIM = 2**16
MAX_HEADS = 2**8
MAX_PATCH_SIZE = 2**8
MAX_REGISTERS = 64
MAX_CLASSES = 2**20


class Shape(TypedDict):
  """Fields of `ViTConfig` that every configuration of transformers has."""

  width: int
  depth: int
  num_heads: int
  patch_size: int
  image_size: int
  layer_norm_epsilon: float


def transformers_shape(fields: Fields, defaults: Shape) -> Shape:
  """Read what all families of transformers call by the same names.

  Args:
    fields: of its config.json.
    defaults: what the family means by an absent field.
  """
  fields.require("num_channels", 3, "images have three channels here", 3)
  return Shape(
    width=fields.int("hidden_size", 1, MAX_WIDTH, defaults["width"]),
    depth=fields.int("num_hidden_layers", 1, MAX_DEPTH, defaults["depth"]),
    num_heads=fields.int(
      "num_attention_heads", 1, MAX_HEADS, defaults["num_heads"]
    ),
    patch_size=fields.size(
      "patch_size", 1, MAX_PATCH_SIZE, defaults["patch_size"]
    ),
    image_size=fields.size(
      "image_size", 1, MAX_IMAGE_SIZE, defaults["image_size"]
    ),
    layer_norm_epsilon=fields.float(
      "layer_norm_eps", 1e-12, 1e-2, defaults["layer_norm_epsilon"]
    ),
  )


def vit_config(
  where: str, *, image_size: int, patch_size: int, **fields: Any
) -> ViTConfig:
  """Return the configuration that a source states.

  Args:
    where: what to call the source in messages.
    image_size: of the source. Where patches do not fill it, the convolution
      leaves out the pixels at its right and lower edge; a multiple of the patch
      size is left.
    patch_size: in pixels.
    **fields: the others of `ViTConfig`.

  Raises:
    BackboneError: for a shape that is not possible.
  """
  side = image_size // patch_size
  if not side:
    raise BackboneError(
      f"{where}: an image of {image_size} pixels has no patch of {patch_size}."
    )
  try:
    return ViTConfig(
      image_size=side * patch_size, patch_size=patch_size, **fields
    )
  except ConfigError as error:
    raise BackboneError(f"{where}: {error}") from error

"""Read the fields of config.json that state how a ViT computes."""

from collections.abc import Mapping
from typing import Any

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays
from memory_vit.backbones.layouts import MAX_DEPTH
from memory_vit.errors import BackboneError, ConfigError
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, ViTConfig
from memory_vit.runtime.messages import brief

# {field of `ViTConfig`: (minimum, maximum) in untrusted files}. The widest
# published ViT has a width of 4,096 and MLPs of 8,192.
LIMITS: Mapping[str, tuple[Any, Any]] = {
  "width": (1, 2**14),
  "depth": (1, MAX_DEPTH),
  "mlp_dim": (1, 2**16),
  "num_heads": (1, 2**8),
  "patch_size": (1, 2**8),
  "image_size": (1, MAX_IMAGE_SIZE),
  "num_classes": (0, 2**24),
  "representation_size": (0, 2**16),
  "class_tokens": (0, 2),
  "registers": (0, 64),
  "layer_norm_epsilon": (0, 1e-2),
  "rope_base": (1, 1e6),
}
# {field of `ViTConfig`: name of this field in all families of transformers}.
TRANSFORMERS = {
  "width": "hidden_size",
  "depth": "num_hidden_layers",
  "mlp_dim": "intermediate_size",
  "num_heads": "num_attention_heads",
  "patch_size": "patch_size",
  "image_size": "image_size",
  "num_classes": "projection_dim",
  "registers": "num_register_tokens",
  "layer_norm_epsilon": "layer_norm_eps",
  "rope_base": "rope_theta",
}


def vit_field(
  fields: Fields, name: str, theirs: str, default: Any = None
) -> Any:
  """Read field `name` of `ViTConfig` from field `theirs`; check `LIMITS`."""
  read: Any = fields.whole
  if name in ("patch_size", "image_size"):
    read = fields.size
  elif name in ("layer_norm_epsilon", "rope_base"):
    read = fields.number
  return read(theirs, *LIMITS[name], default)


def transformers_config(
  fields: Fields, defaults: Mapping[str, Any], **computed: Any
) -> ViTConfig:
  """Read the fields in `defaults` from a configuration of transformers.

  `defaults` is {field of `ViTConfig`: default}, where None marks a required
  field. `computed` has the values of further fields.
  """
  fields.require("num_channels", 3, "memory_vit takes RGB images", 3)
  read = {
    name: vit_field(fields, name, TRANSFORMERS[name], default)
    for name, default in defaults.items()
  }
  return vit_config(fields.where, **{**read, **computed})


def vit_config(
  where: str, *, image_size: int, patch_size: int, **fields: Any
) -> ViTConfig:
  """Build the configuration that a source states.

  If patches do not fill the image, the convolution ignores pixels at the right
  and lower edge, so the image size is rounded down to whole patches.
  """
  side = image_size // patch_size
  if not side:
    raise BackboneError(
      f"{where}: image_size {image_size} is less than patch_size {patch_size}."
    )
  try:
    return ViTConfig(
      image_size=side * patch_size, patch_size=patch_size, **fields
    )
  except ConfigError as error:
    raise BackboneError(f"{where}: {error}") from error


def width_of(arrays: Arrays, name: str, limit: str, where: str) -> int:
  """Return a layer's number of outputs; 0 if there is no layer `name`."""
  most = LIMITS[limit][1]
  for parameter, rank in ((f"{name}.weight", 2), (f"{name}.bias", 1)):
    if parameter in arrays:
      shape = arrays[parameter].shape
      if len(shape) != rank or not 1 <= shape[0] <= most:
        raise BackboneError(
          f"{where}: {parameter} has the shape {brief(shape)}, expected "
          f"{rank} axes, with a length of 1 to {most:,} for the first axis."
        )
      return shape[0]
  return 0

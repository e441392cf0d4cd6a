"""Position embeddings of timm: which tokens the rows of the table belong to."""

import numpy as np

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.table import Arrays
from memory_vit.backbones.families.timm_architectures import Architecture
from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, ViTConfig, square_side
from memory_vit.runtime.messages import brief


def grid(
  model: Architecture, fields: Fields, arrays: Arrays
) -> tuple[int, int]:
  """Return the number of rows in `pos_embed`, and the side of the patch grid.

  9 rows may stand for 3 x 3 patches, or for 5 tokens and 2 x 2 patches. In this
  case the stated image size decides.
  """
  shape = arrays["pos_embed"].shape if "pos_embed" in arrays else ()
  if len(shape) != 3:
    raise BackboneError(
      f"{fields.where}: pos_embed is {brief(shape) if shape else 'missing'}, "
      "expected an array of 3 axes."
    )
  rows, prefix = shape[1], model.class_token + model.reg_tokens
  tokens, args = {0, prefix}, fields.section("model_args")
  if args.has("no_embed_class"):
    tokens = {0 if args.flag("no_embed_class") else prefix}
  patches = [max(0, rows - n) for n in tokens]
  sides = {side for n in patches if (side := square_side(n))}
  image = _built_size(fields)
  if image:
    sides &= {image // model.patch_size}
  side = sides.pop() if len(sides) == 1 else 0
  if not 0 < side * model.patch_size <= MAX_IMAGE_SIZE:
    size_text = f" of {image} pixels a side" if image else ""
    raise BackboneError(
      f"{fields.where}: pos_embed has {rows} positions, expected one per "
      f"patch of a square image{size_text}, and possibly one for each of the "
      f"{prefix} tokens before the patches. An image has at most "
      f"{MAX_IMAGE_SIZE} pixels a side. If the model is for images of another "
      "size, state this size in model_args.img_size."
    )
  return rows, side


def _built_size(fields: Fields) -> int | None:
  """Return the image side that timm builds the model for; None if not fixed."""
  args = fields.section("model_args")
  if args.has("img_size"):
    return args.size("img_size", 1, MAX_IMAGE_SIZE)
  pretrained = fields.section("pretrained_cfg")
  if not pretrained.has("input_size"):
    return None
  side = input_side(pretrained)
  return side if pretrained.flag("fixed_input_size", False) else None


def input_side(pretrained: Fields) -> int:
  """Return the image side in a `pretrained_cfg`; raise if height != width."""
  _, height, width = pretrained.numbers("input_size", 3, 1, MAX_IMAGE_SIZE)
  if height != width:
    raise BackboneError(
      f"{pretrained.where}: input_size is {height:.0f} x {width:.0f}, expected "
      "a square: models for images that are not square are not supported."
    )
  return int(height)


def adapt(found: dict[str, np.ndarray], config: ViTConfig) -> None:
  """Change `found["pos_embed"]` to one row per class token and per patch.

  Rows of registers are added to the array of registers instead. If all rows are
  for patches, each class token gets a row of zeros.
  """
  positions, classes = found["pos_embed"], config.class_tokens
  if positions.shape[1] == config.num_patches:
    positions = np.pad(positions, ((0, 0), (classes, 0), (0, 0)))
  elif config.registers:
    before = classes + config.registers
    found["reg_token"] = found["reg_token"] + positions[:, classes:before]
    positions = np.concatenate(
      [positions[:, :classes], positions[:, before:]], axis=1
    )
  found["pos_embed"] = positions

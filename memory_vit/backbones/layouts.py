"""Layouts of published checkpoints: names, prefixes, position embeddings."""

import dataclasses
import functools
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import jax
import numpy as np

from memory_vit.backbones import position_resizing
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import backbone_shapes
from memory_vit.model.vit_config import ViTConfig, square_side

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]

# Prefixes of parameter names in checkpoints of whole training states.
PREFIXES = ("opt/target/", "params/")
# Parameter names in big_vision's models of images and texts (SigLIP): prefix of
# all names in the image tower, and pattern of all other names (of the text
# tower, the temperature and the bias).
TOWER = "img/"
_BESIDE_TOWER = re.compile(r"txt/.+|t|b")
MAP_HEAD = "MAPHead_0/"

BLOCK = "Transformer/encoderblock_"
STACKED_BLOCKS = "Transformer/encoderblock/"
POSITIONS = "Transformer/posembed_input/pos_embedding"
# A number with a leading zero does not match: files have "1", never "01".
BLOCK_NUMBER = re.compile(rf"{BLOCK}(0|[1-9][0-9]*)/")

# {module name before Flax Linen: module name in Linen}. Before Linen, a single
# counter numbered all modules of a block.
FROM_PRE_LINEN = {
  "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
  "LayerNorm_2": "LayerNorm_1",
  "MlpBlock_3": "MlpBlock_0",
}
TO_PRE_LINEN = {new: old for old, new in FROM_PRE_LINEN.items()}

# Maximum number of blocks in an untrusted file. Every published ViT has fewer.
MAX_DEPTH = 64


@functools.lru_cache(maxsize=8)  # each model needs the shapes several times
def expected_shapes(config: ViTConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
  """Return the shapes of all parameters, from tracing only one block."""
  one_block = dataclasses.replace(config, depth=1)
  traced = trees.flatten(backbone_shapes(one_block))
  first = f"{BLOCK}0/"
  return {
    name.replace(first, f"{BLOCK}{i}/"): array
    for name, array in traced.items()
    for i in range(config.depth if name.startswith(first) else 1)
  }


def without_prefix(entries: Iterable[str]) -> dict[str, str]:
  """Return {parameter name without prefix: its entry in the file}."""
  names = {entry: entry for entry in entries}
  for prefix in PREFIXES:
    if any(name.startswith(prefix) for name in names):
      # Leave out entries without the prefix, such as optimizer state and steps.
      names = {
        name.removeprefix(prefix): entry
        for name, entry in names.items()
        if name.startswith(prefix)
      }
  return _of_tower(names)


def _of_tower(names: dict[str, str]) -> dict[str, str]:
  """Return the entries of SigLIP's image tower; for other models, `names`."""
  tower = {n: entry for n, entry in names.items() if n.startswith(TOWER)}
  beside = names.keys() - tower.keys()
  if not tower or not all(map(_BESIDE_TOWER.fullmatch, beside)):
    return names
  return {name.removeprefix(TOWER): entry for name, entry in tower.items()}


def has_map_head(names: Collection[str]) -> bool:
  """Return whether the model has a probe (SigLIP) instead of a class token."""
  return "cls" not in names and any(n.startswith(MAP_HEAD) for n in names)


def as_vit_jax(arrays: Arrays, file: Path) -> Arrays:
  """Convert to the layout of vit_jax, with modules numbered as in Linen."""
  converted: Arrays = {}
  for name, array in arrays.items():
    if _is_stacked(name, array) and len(array) > MAX_DEPTH:
      raise BackboneError(
        f"{file}: {name} has {len(array):,} blocks, expected at most "
        f"{MAX_DEPTH}."
      )
    for new_name, new_array in as_published(name, array):
      if new_name in converted:
        raise BackboneError(f"{file} has {new_name} twice, in two layouts.")
      converted[new_name] = new_array
  if "pos_embedding" in arrays and not has_map_head(arrays):
    converted[POSITIONS] = _with_class_position(converted[POSITIONS])
  return converted


def as_published(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
  """Return [(vit_jax name, array)]; split an array that stacks all blocks."""
  if name == "pos_embedding":
    return [(POSITIONS, array)]
  name = renumbered(name, FROM_PRE_LINEN)
  if _is_stacked(name, array):
    inner = name.removeprefix(STACKED_BLOCKS)
    return [(f"{BLOCK}{i}/{inner}", layer) for i, layer in enumerate(array)]
  return [(name, array)]


def _is_stacked(name: str, array: np.ndarray) -> bool:
  return name.startswith(STACKED_BLOCKS) and array.ndim > 0


def renumbered(name: str, numbers: dict[str, str]) -> str:
  """Replace module names within the name of a parameter."""
  return "/".join(numbers.get(part, part) for part in name.split("/"))


def _with_class_position(positions: np.ndarray) -> np.ndarray:
  """Prepend a zero for the class token to positions (1, n, d) of big_vision.

  In files of big_vision, the array `cls` is the sum of the class token and its
  position. Files of vit_jax store the token and the position separately. The
  backbone has the same outputs with either file, but different fingerprints.
  The outputs of a task differ between the two files. A task replaces the stored
  class token by its own. With a file of vit_jax, the stored position is added
  to the task's token; with a file of big_vision, zero is added.
  """
  if positions.ndim != 3 or not square_side(positions.shape[1]):
    return positions
  return np.pad(positions, ((0, 0), (1, 0), (0, 0)))


def resize_positions(
  positions: np.ndarray,
  side: int,
  kind: str = "bilinear",
  class_tokens: int = 1,
) -> np.ndarray:
  """Resize the patch grid of positions (1, n, d) to side x side."""
  old = square_side(positions.shape[1] - class_tokens)
  if side == old:
    return positions
  grid = positions[0, class_tokens:].reshape(old, old, -1)
  grid = position_resizing.resized(grid, side, kind)
  logger.info(
    "resized position embedding from (%d,%d) to (%d,%d)", old, old, side, side
  )
  patches = grid.reshape(1, side * side, -1)
  return np.concatenate([positions[:, :class_tokens], patches], axis=1)

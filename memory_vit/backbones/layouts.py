"""Layouts of published checkpoints: names, prefixes, position embeddings."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from memory_vit.backbones import position_resizing
from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import square_side

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]

# Around the parameters in the files of whole training states.
PREFIXES = ("opt/target/", "params/")

BLOCK = "Transformer/encoderblock_"
STACKED_BLOCKS = "Transformer/encoderblock/"
POSITIONS = "Transformer/posembed_input/pos_embedding"
# As it is written; "01" is another name.
BLOCK_NUMBER = re.compile(rf"{BLOCK}(0|[1-9][0-9]*)/")

# Before Linen, one counter ran through all the layers of a block.
FROM_PRE_LINEN = {
  "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
  "LayerNorm_2": "LayerNorm_1",
  "MlpBlock_3": "MlpBlock_0",
}
TO_PRE_LINEN = {new: old for old, new in FROM_PRE_LINEN.items()}

# More blocks than any published ViT has; a name may have any number in it.
MAX_DEPTH = 64


def without_prefix(entries: Iterable[str]) -> dict[str, str]:
  """Return {name of a parameter: its entry in the file}."""
  names = {entry: entry for entry in entries}
  for prefix in PREFIXES:
    if any(name.startswith(prefix) for name in names):
      # Beside it are the state of the optimiser, clocks and the like.
      names = {
        name.removeprefix(prefix): entry
        for name, entry in names.items()
        if name.startswith(prefix)
      }
  return names


def as_vit_jax(arrays: Arrays, file: Path) -> Arrays:
  """Convert all known entries to the layout of vit_jax, numbered by Linen."""
  converted = {}
  for name, array in arrays.items():
    if _is_stacked(name, array) and len(array) > MAX_DEPTH:
      raise BackboneError(
        f"{file}: {name} has {len(array):,} blocks, expected at most "
        f"{MAX_DEPTH}."
      )
    for new_name, new_array in as_published(name, array):
      if new_name in converted:
        raise BackboneError(
          f"{file} has {new_name} more than once, in two layouts."
        )
      converted[new_name] = new_array
  return converted


def as_published(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
  """Name an array of a file as published; stacked blocks have several names."""
  if name == "pos_embedding":
    return [(POSITIONS, _with_class_position(array))]
  name = renumbered(name, FROM_PRE_LINEN)
  if _is_stacked(name, array):
    inner = name.removeprefix(STACKED_BLOCKS)
    return [(f"{BLOCK}{i}/{inner}", layer) for i, layer in enumerate(array)]
  return [(name, array)]


def _is_stacked(name: str, array: np.ndarray) -> bool:
  return name.startswith(STACKED_BLOCKS) and array.ndim > 0


def renumbered(name: str, numbers: dict[str, str]) -> str:
  """Rename the modules in the name of a parameter, as `numbers` says."""
  return "/".join(numbers.get(part, part) for part in name.split("/"))


def _with_class_position(positions: np.ndarray) -> np.ndarray:
  """Give a big_vision position embedding (1, n, d) an entry for the class.

  It is zero, as `cls` of these files has it added. Therefore the fingerprint
  differs from that of the same weights unfolded: the backbone computes the same
  from both, but a task adds the entry to its own class token.
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
  """Position embedding (1, class + n, d) -> (1, class + side^2, d).

  Args:
    positions: those of class tokens, which stay, and of a square of patches.
    side: of the new square.
    kind: `ViTConfig.position_resize`.
    class_tokens: `ViTConfig.class_tokens`.
  """
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

"""Interface of the converters: weights of a source in, a ViT of ours out."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence

import numpy as np

from memory_vit.errors import BackboneError
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime.messages import brief, listed

# Name -> float32. One from a file reads an array each time it is asked for.
Arrays = Mapping[str, np.ndarray]
Rgb = tuple[float, float, float]

# Values of missing arrays, beyond as many as were found: a configuration from
# a stranger may speak of terabytes.
_MOST_MISSING = 2**24
_MOST_CHARACTERS = 1_500
_INDENTED = "\n  "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
  """A ViT of a family, in our layout.

  Attributes:
    config: how it computes.
    arrays: "a/b/c" -> float32, exactly those of the tree of `config`. The
      patch kernel takes images as the family normalizes them: who has read the
      mean and the deviation folds them in.
    image_mean: of images in [0, 1], as the family documents it, for a source
      that states none; None where the source has to.
    image_std: the same, of the standard deviation.
  """

  config: ViTConfig
  arrays: Arrays
  image_mean: Rgb | None = None
  image_std: Rgb | None = None


class Weights:
  """The arrays of a source, of which each has to be taken once.

  Nothing is guessed and nothing is skipped: `done` raises one error with all
  that is missing, misshapen or left over.
  """

  def __init__(
    self, arrays: Arrays, where: str, ignored: Sequence[str] = ()
  ) -> None:
    """Wrap arrays.

    Args:
      arrays: of the source.
      where: what to call it in messages.
      ignored: names, or patterns such as "*.position_ids", of arrays that hold
        nothing of the model: buffers, and what only its pretraining used.
    """
    self._arrays = arrays
    self._where = where
    self._problems: list[str] = []
    self._left = {
      name
      for name in arrays
      if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    }
    self._found = self._missing = 0

  def has(self, name: str) -> bool:
    """Whether there is an array of that name that was not taken yet."""
    return name in self._left

  def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of that name; zeros of that shape where it cannot be used.

    Args:
      name: in the source.
      shape: that it has to have.

    Raises:
      BackboneError: where so much is missing that it would be no use to go on.
    """
    if name in self._left:
      self._left.remove(name)
      array = self._arrays[name]
      if array.shape == shape:
        self._found += array.size
        return array
      self._problems.append(f"shape of {name}: {array.shape}, expected {shape}")
    else:
      self._problems.append(f"missing: {name} {shape}")
    self._missing += math.prod(shape)
    if self._missing > self._found + _MOST_MISSING:
      raise self._refusal("further names were not compared")
    return np.zeros(shape, np.float32)

  def done(self) -> None:
    """Raise `BackboneError`, with all problems, unless all fitted."""
    if self._problems or self._left:
      raise self._refusal()

  def _refusal(self, *remarks: str) -> BackboneError:
    lines = sorted(self._problems)
    # Of a stopped comparison, what is left over is no problem.
    if not remarks:
      lines += [f"extra: {brief(name)}" for name in sorted(self._left)]
    message = [
      f"{self._where}: the arrays beside it are not exactly those of the model "
      "that it describes:",
      listed(lines, _INDENTED, _MOST_CHARACTERS),
      *remarks,
    ]
    return BackboneError(_INDENTED.join(message))

"""Model inputs of a batch: images, or cached outputs of the frozen pass."""

from collections.abc import Callable, Mapping
from typing import Any


def inputs_of(
  batch: Mapping[str, Any],
  prepare: Callable[[Any], Any] = lambda images: images,
) -> Any:
  """Inputs of the trained part: cached ones, else `prepare` of the images.

  `batch` has the images as "image", or the outputs of the frozen pass as
  "inputs".
  """
  return batch["inputs"] if "inputs" in batch else prepare(batch["image"])

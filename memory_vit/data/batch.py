"""Model inputs of a batch: images, or cached outputs of the frozen pass."""

from collections.abc import Callable, Mapping
from typing import Any


def inputs_of(
  batch: Mapping[str, Any],
  prepare: Callable[[Any], Any] = lambda images: images,
) -> Any:
  """Return the inputs of the trained part of the model.

  The inputs are `batch["inputs"]`, the cached outputs of the frozen pass, if
  they exist, otherwise `prepare(batch["image"])`.
  """
  return batch["inputs"] if "inputs" in batch else prepare(batch["image"])

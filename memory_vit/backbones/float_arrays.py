"""Arrays of any float as float32, in which weights are used."""

import numpy as np

from memory_vit.errors import BackboneError


def as_float32(array: np.ndarray, where: str) -> np.ndarray:
  """Cast an array of any float.

  Raises:
    BackboneError: where it has no values, or some that are not finite as
      float32.
  """
  if not array.size:
    raise BackboneError(f"{where} has the shape {array.shape}: no values.")
  with np.errstate(over="ignore", invalid="ignore"):
    cast = array.astype(np.float32, copy=False)
  if not np.isfinite(cast).all():
    raise BackboneError(f"{where} has values that are not finite as float32.")
  return cast

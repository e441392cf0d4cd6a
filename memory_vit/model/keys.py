"""Random keys that users give."""

from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.errors import MemoryVitError


def require_key(key: Any) -> None:
  """Raise `MemoryVitError` unless this is one random key of JAX.

  Args:
    key: of `jax.random.key`, or in the older form of `jax.random.PRNGKey`.
  """
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  if dtype is not None:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
      return
    if dtype == jnp.uint32 and shape is not None and len(shape) == 1:
      return
  found = type(key).__name__ if dtype is None else f"{dtype} {shape}"
  raise MemoryVitError(
    f"the random key is {found}, expected one key of JAX, such as "
    "jax.random.key(0)."
  )

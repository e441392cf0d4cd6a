"""Checks that images have the range that the model expects.

Images of 0 to 255, or with a NaN, would give logits like any others.
"""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from memory_vit.errors import DataError
from memory_vit.model.trees import AnyArray

Images = Float[AnyArray, "..."]
# What rounding may add if images are resized after scaling; ours resizes first.
_BOUND = 1 + 1e-5


def require_shape(images: Shaped[AnyArray, "..."], size: int) -> None:
  """Raise `DataError` unless these are floats (b, size, size, 3)."""
  if images.shape[1:] != (size, size, 3) or not jnp.issubdtype(
    images.dtype, jnp.floating
  ):
    raise DataError(
      f"images are {images.dtype} {images.shape}, expected floats in [-1, 1] "
      f"of shape (batch, {size}, {size}, 3), as mv.preprocess makes them."
    )


def begin(images: Images) -> Callable[[], None]:
  """Begin to check that values are in [-1, 1]; the result waits and raises."""
  if isinstance(images, jax.core.Tracer):
    return lambda: None
  if isinstance(images, np.ndarray):
    return lambda: _require(_within_on_host(images), images)
  # The device checks before the program that follows, and runs that one while
  # the answer is awaited.
  with _now():
    within = _within(images)
  return lambda: _require(bool(within), images)


def _within_on_host(images: Float[np.ndarray, "..."]) -> bool:
  # With a NaN both are NaN, and no comparison holds.
  return bool(
    images.min(initial=0) >= -_BOUND and images.max(initial=0) <= _BOUND
  )


@jax.jit
def _within(images: Float[Array, "..."]) -> Bool[Array, ""]:
  return jnp.all(jnp.abs(images) <= _BOUND)


def _require(within: bool, images: Images) -> None:
  if within:
    return
  if isinstance(images, np.ndarray):
    least, greatest, nans, infinite = _describe_on_host(images)
  else:
    with _now():
      least, greatest, nans, infinite = map(float, _describe(images))
  known = least <= greatest
  found = f"values from {least:.6g} to {greatest:.6g}" if known else "no number"
  if nans or infinite:
    found += f", {nans:.0f} NaN and {infinite:.0f} infinite"
  raise DataError(
    f"images have {found}; expected finite values in [-1, 1]. mv.preprocess "
    "makes them of files and of uint8 arrays; pixels x of 0 to 255 are scaled "
    "by (x - 127.5) / 127.5."
  )


def _describe_on_host(
  images: Float[np.ndarray, "..."],
) -> tuple[float, ...]:
  """`_describe`, with nothing compiled, and nothing put on the device."""
  finite = images[np.isfinite(images)]
  return (
    float(finite.min(initial=np.inf)),
    float(finite.max(initial=-np.inf)),
    float(np.isnan(images).sum()),
    float(np.isinf(images).sum()),
  )


@jax.jit
def _describe(images: Float[Array, "..."]) -> tuple[Shaped[Array, ""], ...]:
  """Range of finite values, and the numbers of NaN and infinite ones."""
  finite = jnp.isfinite(images)
  return (
    jnp.min(images, where=finite, initial=jnp.inf),
    jnp.max(images, where=finite, initial=-jnp.inf),
    jnp.isnan(images).sum(),
    jnp.isinf(images).sum(),
  )


def _now() -> contextlib.AbstractContextManager[None]:
  """Compute at once, also while JAX traces a function of other arrays."""
  return jax.ensure_compile_time_eval()

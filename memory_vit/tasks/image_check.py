"""Images that the model does not expect are refused.

It would compute on without a word: images of 0 to 255, or with a NaN, give
logits like any others.
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
# What rounding may add where images are resized after they were scaled. Our
# own preprocessing resizes first, and is never outside.
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
  """Begin to look whether all values are in [-1, 1].

  The device does so before the program that is handed over next, and works on
  that one while the answer is awaited. Arrays of NumPy are looked at on the
  host, meanwhile. Of what JAX traces the values are not known: it passes.

  Returns:
    A function that waits for the answer, and raises `DataError` unless all
    values are in [-1, 1].
  """
  if isinstance(images, jax.core.Tracer):
    return lambda: None
  if isinstance(images, np.ndarray):
    return lambda: _require(_within_on_host(images), images)
  with _now():
    within = _within(images)
  return lambda: _require(bool(within), images)


def _within_on_host(images: Float[np.ndarray, "..."]) -> bool:
  # Of a NaN either is NaN, and no comparison holds.
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
  """Range of what is finite, and how many are NaN or infinite."""
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

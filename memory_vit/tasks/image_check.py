"""Check that images have the range that the model expects.

Pixels in [0, 255], or a NaN, would otherwise give wrong logits silently.
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
# Largest accepted magnitude of a value. It exceeds 1 a little, because resizing
# an image after scaling may round to values beyond 1.
_BOUND = 1 + 1e-5


def require_shape(images: Shaped[AnyArray, "..."], size: int) -> None:
  """Raise `DataError` unless images are floats (b, size, size, 3)."""
  if images.shape[1:] != (size, size, 3) or not jnp.issubdtype(
    images.dtype, jnp.floating
  ):
    raise DataError(
      f"images are {images.dtype} {images.shape}, expected floats in [-1, 1] "
      f"of shape (batch, {size}, {size}, 3), as mv.preprocess makes them."
    )


def begin(images: Images) -> Callable[[], None]:
  """Start to check values; return a function that raises for invalid values."""
  if isinstance(images, jax.core.Tracer):
    return lambda: None
  if isinstance(images, np.ndarray):
    return lambda: _require(_within_on_host(images), images)
  # Start the check before the caller starts the model: the device then runs the
  # model while the host waits for the result of the check.
  with _now():
    within = _within(images)
  return lambda: _require(bool(within), images)


def _within_on_host(images: Float[np.ndarray, "..."]) -> bool:
  # If an image has a NaN, minimum and maximum are NaN, and the result is False.
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
  values = f"values from {least:.6g} to {greatest:.6g}"
  text = values if least <= greatest else "no finite value"
  if nans or infinite:
    text += f", {nans:.0f} NaN and {infinite:.0f} infinite"
  raise DataError(
    f"images have {text}; expected finite values in [-1, 1]. mv.preprocess "
    "makes such images from files and uint8 arrays; without it, scale pixels "
    "x from [0, 255] to (x - 127.5) / 127.5."
  )


def _describe_on_host(
  images: Float[np.ndarray, "..."],
) -> tuple[float, ...]:
  """Return (finite minimum, finite maximum, number of NaN, number of inf)."""
  finite = images[np.isfinite(images)]
  return (
    float(finite.min(initial=np.inf)),
    float(finite.max(initial=-np.inf)),
    float(np.isnan(images).sum()),
    float(np.isinf(images).sum()),
  )


@jax.jit
def _describe(images: Float[Array, "..."]) -> tuple[Shaped[Array, ""], ...]:
  """Return (finite minimum, finite maximum, number of NaN, number of inf)."""
  finite = jnp.isfinite(images)
  return (
    jnp.min(images, where=finite, initial=jnp.inf),
    jnp.max(images, where=finite, initial=-jnp.inf),
    jnp.isnan(images).sum(),
    jnp.isinf(images).sum(),
  )


def _now() -> contextlib.AbstractContextManager[None]:
  """Return a context in which JAX computes at once, even during tracing."""
  return jax.ensure_compile_time_eval()

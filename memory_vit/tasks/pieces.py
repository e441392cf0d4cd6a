"""Compiled programs that a CPU runs on a few images at a time.

The activations of a large batch exceed the caches of a CPU: sixteen images in
an L/14 take 30 % less time in pieces of two (float32; docs/reference/costs.md).
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
from jaxtyping import Array, Float

from memory_vit.model.trees import AnyArray
from memory_vit.model.vit_config import ViTConfig
from memory_vit.runtime import sharding

_Outputs = TypeVar("_Outputs")
# Maximum size in bytes of the MLP activations (the largest activations) of all
# images that run at once. On a CPU with 32 MiB of shared cache, in float32, a
# pass is 6 to 14 % slower at twice this size; at half this size, its time
# changes by less than 2 %.
_BYTES = 12 * 2**20


class ImageProgram(Generic[_Outputs]):
  """A compiled function of a backbone's parameters and images."""

  def __init__(self, function: Callable[..., _Outputs]) -> None:
    """Wrap `function(params, images, config)`.

    The function must return one row of outputs for each image.
    """
    functools.update_wrapper(self, function)

    def run(
      params: Any, images: Any, *, config: ViTConfig, piece: int | None
    ) -> _Outputs:
      return _in_pieces(
        functools.partial(function, params, config=config), images, piece
      )

    run.__name__ = function.__name__  # the name appears in logs and profiles
    self.compiled = jax.jit(run, static_argnames=("config", "piece"))

  def __call__(
    self,
    params: Any,
    images: Float[AnyArray, "b side side 3"],
    *,
    config: ViTConfig,
  ) -> _Outputs:
    piece = images_in_piece(params, images, config)
    return self.compiled(params, images, config=config, piece=piece)


def images_in_piece(
  params: Any, images: Float[AnyArray, "b side side 3"], config: ViTConfig
) -> int | None:
  """Return how many images to run at once, a divisor of b; None means all."""
  # Run all images at once unless arrays are on one CPU: other devices are fast
  # with large batches, a mesh splits batches itself, and a function that JAX
  # traces may be exported to any device.
  if not sharding.on_one_cpu([images, *jax.tree.leaves(params)[:1]]):
    return None
  batch = images.shape[0]
  tokens = config.class_tokens + config.registers + config.num_patches
  most = max(1, _BYTES // (4 * tokens * config.mlp_dim))
  if batch <= most:
    return None
  divisor = max(k for k in range(1, most + 1) if not batch % k)
  # If even the largest divisor is less than half of `most`, run all images at
  # once, because matrix products with few rows are slow.
  return divisor if 2 * divisor >= most else None


def _in_pieces(
  run: Callable[[Float[Array, "_ side side 3"]], _Outputs],
  images: Float[Array, "b side side 3"],
  piece: int | None,
) -> _Outputs:
  if piece is None:
    return run(images)
  batch, *shape = images.shape
  outputs = jax.lax.map(run, images.reshape(batch // piece, piece, *shape))
  return jax.tree.map(lambda a: a.reshape(batch, *a.shape[2:]), outputs)

"""A depthwise convolution over a grid of patches.

XLA's own convolution is slow on CPUs if each channel is a group. Here, the
convolution is nine shifted products, which XLA fuses. The gradient is written
by hand, because jax would store nine shifted copies, and pad nine gradients.
"""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

_Grid = Float32[Array, "g b y x r"]
_Weights = Float32[Array, "g 3 3 r"]


@jax.custom_vjp
def convolve(grid: _Grid, weights: _Weights) -> _Grid:
  """Convolve the grids of g tasks with 3 x 3 weights, with zero padding."""
  products = (
    shifted * weights[:, i, j][:, None, None, None]
    for i, j, shifted in _shifts(grid)
  )
  return sum(products)  # type: ignore[return-value]


def _shifts(grid: _Grid) -> Iterator[tuple[int, int, _Grid]]:
  """Yield (i, j, grid): the shifted grid that `weights[:, i, j]` multiplies."""
  y, x = grid.shape[2:4]
  padded = jnp.pad(grid, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
  for i, j in itertools.product(range(3), repeat=2):
    yield i, j, padded[:, :, i : i + y, j : j + x]


def _forward(
  grid: _Grid, weights: _Weights
) -> tuple[_Grid, tuple[_Grid, _Weights]]:
  return convolve(grid, weights), (grid, weights)


def _backward(
  saved: tuple[_Grid, _Weights], gradient: _Grid
) -> tuple[_Grid, _Weights]:
  grid, weights = saved
  weight_gradients = [
    (shifted * gradient).sum((1, 2, 3)) for _, _, shifted in _shifts(grid)
  ]
  return (
    convolve(gradient, weights[:, ::-1, ::-1]),
    jnp.stack(weight_gradients, axis=1).reshape(weights.shape),
  )


convolve.defvjp(_forward, _backward)

"""A depthwise convolution over a grid of patches.

XLA's own is slow on CPUs where each channel is a group; nine shifted products
become one pass over the patches. Their gradient is written by hand: jax would
keep all nine shifted copies for it, and pad each of the nine gradients.
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
  """Convolve the grids of g tasks with 3 x 3 weights; around them is zero."""
  products = (
    shifted * weights[:, i, j][:, None, None, None]
    for i, j, shifted in _shifts(grid)
  )
  return sum(products)  # type: ignore[return-value]


def _shifts(grid: _Grid) -> Iterator[tuple[int, int, _Grid]]:
  """Yield each place (i, j) of the weights, and the grid shifted to it."""
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
  of_weights = [
    (shifted * gradient).sum((1, 2, 3)) for _, _, shifted in _shifts(grid)
  ]
  return (
    convolve(gradient, weights[:, ::-1, ::-1]),
    jnp.stack(of_weights, axis=1).reshape(weights.shape),
  )


convolve.defvjp(_forward, _backward)

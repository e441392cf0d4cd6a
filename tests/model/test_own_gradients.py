"""Gradients that are written by hand are those of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memory_vit.model import depthwise, layer_norms


def convolution(grid, weights):
  """A depthwise convolution by XLA, with weights (3, 3, 1, r)."""

  def of_one(grid, weights):
    return jax.lax.conv_general_dilated(
      grid, weights[:, :, None], (1, 1), "SAME",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
      feature_group_count=grid.shape[-1],
    )  # fmt: skip

  return jax.vmap(of_one)(grid, weights)


def standardization(z):
  mean, variance = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
  return (z - mean) / jnp.sqrt(variance + 1e-6)


CASES = {
  "convolution": (
    depthwise.convolve, convolution, ((2, 3, 4, 5, 6), (2, 3, 3, 6)),
  ),
  "a single patch": (
    depthwise.convolve, convolution, ((1, 2, 1, 1, 4), (1, 3, 3, 4)),
  ),
  "standardization": (
    lambda z: layer_norms.standardized(z, 1e-6), standardization, ((3, 4, 8),),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_formula(name):
  function, formula, shapes = CASES[name]
  rng = np.random.default_rng(0)
  arguments = [jnp.asarray(rng.standard_normal(s), "float32") for s in shapes]
  values, gradient_of = jax.vjp(function, *arguments)
  expected, expected_of = jax.vjp(formula, *arguments)
  cotangent = jnp.asarray(rng.standard_normal(values.shape), "float32")
  np.testing.assert_allclose(values, expected, atol=1e-5)
  for found, wanted in zip(
    gradient_of(cotangent), expected_of(cotangent), strict=True
  ):
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_convolution_keeps_its_arguments_alone():
  grid, weights = jnp.ones((1, 2, 4, 4, 3)), jnp.ones((1, 3, 3, 3))
  _, gradient_of = jax.vjp(depthwise.convolve, grid, weights)
  kept = sum(leaf.size for leaf in jax.tree.leaves(gradient_of))
  assert kept == grid.size + weights.size

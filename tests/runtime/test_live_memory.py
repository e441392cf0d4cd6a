"""The memory of programs, estimated from their shapes."""

import jax
import jax.numpy as jnp
import pytest
from conftest import random_task, tiny_backbone
from steps import setting

from memory_vit.runtime import live_memory, sharding
from memory_vit.runtime.live_memory import temporary_bytes

SIDE = 64
MATRIX = 4 * SIDE**2


def traced(f, *shapes):
  return jax.jit(f).trace(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))


def matrices(f):
  """How many matrices are written beside the result, without the margin."""
  taken = temporary_bytes(traced(f, (SIDE, SIDE), (SIDE, SIDE)))
  return taken / live_memory._MARGIN / MATRIX


def test_products_are_counted_while_they_are_needed():
  assert matrices(lambda a, b: a @ b) == 0  # the result
  assert matrices(lambda a, b: a @ b @ a) == 1
  assert matrices(lambda a, b: a @ b @ a @ b) == 2
  assert matrices(lambda a, b: (a @ b) @ (b @ a)) == 2


def test_fused_values_and_views_are_not_counted():
  assert matrices(lambda a, b: jnp.tanh(a @ b) + 1) == 1
  assert matrices(lambda a, b: (a @ b).T.reshape(-1)) == 1
  assert matrices(lambda a, b: a.T @ b) == 0


def test_values_are_written_for_products_and_for_several_readers():
  assert matrices(lambda a, b: jnp.tanh(a @ b) @ b) == 2

  def f(a, b):
    x = jnp.tanh(a @ b)
    return x + jnp.exp(x)

  assert matrices(f) == 2


def test_a_value_lives_until_what_is_fused_of_it_is_read():
  def f(a, b):
    half = (a @ b) / 2  # not written: the product is read below
    return (b @ a @ b).sum() + half

  assert matrices(f) == 3


def test_programs_that_are_called_are_looked_into():
  @jax.jit
  def inner(a, b):
    return a @ b @ a

  @jax.custom_vjp
  def outer(a, b):
    return inner(a, b)

  outer.defvjp(lambda a, b: (outer(a, b), None), lambda _, g: (g, g))
  assert matrices(inner) == matrices(outer) == 1


@pytest.mark.parametrize(
  ("regime", "count", "devices"),
  [
    ("memory_masked", 6, 8),
    ("head", 3, 1),
    *(
      pytest.param(*values, marks=pytest.mark.slow)
      for values in (
        ("memory_masked", 1, 1), ("memory_masked", 6, 1),
        ("cls_masked", 4, 1), ("side_masked", 1, 1), ("side_masked", 6, 1),
        ("side_masked", 3, 8), ("full", 1, 1), ("full", 1, 8),
        ("adapter", 1, 1), ("memory", 1, 1),
      )
    ),
  ],
)  # fmt: skip
def test_estimate_is_at_most_twice_what_xla_allocates(regime, count, devices):
  backbone = tiny_backbone(image_size=16, depth=3)
  mesh = sharding.make_mesh(jax.devices()[:devices])
  options = {
    "cells": 2 if "memory" in regime else 0,
    "bottleneck": 4 if regime == "adapter" else 0,
  }
  tasks = [
    random_task(backbone, f"t{i}", regime=regime, classes=20, seed=i, **options)
    for i in range(count)
  ]
  step, state, frozen = setting(backbone, mesh, tasks)
  images = jax.ShapeDtypeStruct((64, 16, 16, 3), jnp.float32)
  batch = {"label": jax.ShapeDtypeStruct((64,), jnp.int32)}
  if tasks[0].spec.regime in ("full", "adapter", "memory"):
    batch["image"] = images
  else:  # as cached: what prepares them has a test of its own
    batch["inputs"] = jax.eval_shape(step.prepare, frozen, images)
  estimated, taken = (
    step.memory(state.params, frozen, batch, temporary=temporary).total
    for temporary in (live_memory.temporary_bytes, live_memory.compiled_bytes)
  )
  assert taken <= estimated <= 2 * taken


def test_estimate_of_the_frozen_pass_is_at_most_twice_its_memory():
  backbone = tiny_backbone(image_size=16, depth=3)
  step, _, frozen = setting(
    backbone,
    sharding.make_mesh(jax.devices()[:1]),
    [random_task(backbone, "t")],
  )
  images = jax.ShapeDtypeStruct((64, 16, 16, 3), jnp.float32)
  program = jax.jit(step.prepare).trace(frozen, images)
  taken = program.lower().compile().memory_analysis().temp_size_in_bytes
  assert taken <= temporary_bytes(program) <= 2 * taken

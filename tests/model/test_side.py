"""The side stream: what it adds, to which tasks, and in which slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit.errors import ConfigError, TaskError
from memory_vit.model.parts import side
from memory_vit.model.parts.side import SideStreams
from memory_vit.model.regimes import REGIMES, get_regime, is_regime
from memory_vit.runtime.dtypes import Precision
from memory_vit.tasks import inference


def side_task(backbone, name, *, seed=1, mixing="conv", width=4, **options):
  options = {"cells": 0, "regime": "side_masked", **options}
  return random_task(
    backbone, name, seed=seed, side_width=width, side_mixing=mixing, **options
  )


def without_side(task):
  """The same task without its side stream."""
  spec = dataclasses.replace(
    task.spec, regime="norms_layers_masked", side_width=0, side_mixing=""
  )
  rest = {part: v for part, v in task.params.items() if part != "side"}
  return mv.Task(spec, rest)


def changed(task, part, value):
  """The task with a part of its side stream filled with a value."""
  filled = jax.tree.map(
    lambda a: np.full_like(a, value), task.params["side"][part]
  )
  side = {**task.params["side"], part: filled}
  return mv.Task(task.spec, {**task.params, "side": side})


@pytest.mark.parametrize(
  "mixing", [pytest.param("conv", marks=pytest.mark.slow), "none"]
)
def test_new_stream_changes_no_bit(backbone, images, mixing):
  task = changed(side_task(backbone, "a", mixing=mixing), "up", 0)
  expected = mv.forward(backbone, without_side(task), images)
  found = mv.forward(backbone, task, images)
  assert np.array_equal(found["a"], expected["a"])
  new = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, regime="side_masked"
  )
  assert not any(a.any() for a in jax.tree.leaves(new.params["side"]["up"]))
  assert new.spec.side == (16, "conv")


@pytest.mark.parametrize("shift", [0.0, 0.6])
def test_tpus_narrow_standardized_tokens(shift):
  """As if each token were standardized first, which others do to the bit.

  In backbones at hand the mean of a token is up to 0.65 standard deviations.
  """
  rng = np.random.default_rng(0)
  z = jnp.asarray(rng.normal(shift, 1, (2, 3, 4, 16)), jnp.bfloat16)
  kernel = rng.normal(size=(2, 64, 5)).astype(np.float32) / 8
  wide = np.asarray(z, np.float64).reshape(2, 3, 64)
  centered = wide - wide.mean(-1, keepdims=True)
  exact = centered / np.sqrt(centered.var(-1, keepdims=True) + 1e-6)
  exact = np.einsum("bsd,gdr->gbsr", exact, kernel)
  for dtype, platform, tolerance in (
    ("float32", "tpu", 1e-5), ("bfloat16", "tpu", 0.01), ("bfloat16", "", 0.02),
  ):  # fmt: skip
    precision = Precision(dtype, platform)
    found = side._narrowed(z.astype(jnp.float32), kernel, precision)
    np.testing.assert_allclose(found, exact, atol=tolerance)


def test_tpus_narrow_constant_tokens_to_finite_values():
  z, kernel = jnp.full((1, 2, 4, 16), 7.3), jnp.ones((1, 64, 3))
  gradient = jax.grad(
    lambda k: side._narrowed(z, k, Precision("bfloat16", "tpu")).sum()
  )(kernel)
  assert jnp.isfinite(gradient).all()


def test_streams_of_all_kinds_share_a_pass(backbone, images):
  tasks = [
    side_task(backbone, "a"),
    random_task(backbone, "memory", seed=2),
    side_task(backbone, "b", seed=3, width=3, attends_to=["a", "memory"]),
    side_task(backbone, "c", seed=4, mixing="none"),
    side_task(backbone, "d", seed=5),
  ]
  params = {
    "backbone": backbone.params, "tasks": {t.name: t.params for t in tasks},
  }  # fmt: skip
  known = [(t.name, t.spec.attends_to, True) for t in tasks]
  expected = jax.jit(
    lambda params: oracle.forward(backbone.config, params, known, images)
  )(params)
  found = mv.forward(backbone, tasks, images)
  module = mv.MemoryViT(backbone.config, tasks)
  trained = jax.jit(module.apply)({"params": params}, images)
  original = mv.forward(backbone, [], images)["backbone"]
  assert np.array_equal(found["backbone"], original)
  for name, logits in expected.items():
    np.testing.assert_allclose(found[name], logits, atol=1e-4)
    np.testing.assert_allclose(trained[name], logits, atol=1e-4)
  for task in (tasks[0], tasks[3], tasks[4]):
    plain = mv.forward(backbone, without_side(task), images)[task.name]
    assert not np.allclose(plain, found[task.name], atol=1e-2)


@pytest.mark.parametrize("width", [3, 16])
def test_neighbours_in_a_group_of_streams_change_no_bit(
  backbone, images, width
):
  """Neighbours change nothing to the bit, not even one that is NaN."""
  a = side_task(backbone, "a", width=width)
  b = side_task(backbone, "b", seed=2, width=width)
  broken = changed(b, "down", np.nan)
  plain = random_task(backbone, "p", seed=3, cells=0)
  predictor = mv.Predictor.from_model(
    backbone, [b, a, plain], batch_sizes=(2,), warm_up=False
  )
  pixels = np.asarray(images[:2])

  def answers():
    return predictor.predict_pixels(pixels).logits

  expected = answers()
  size = inference.read_program._cache_size()
  predictor.replace("b", broken)  # the stream that p has by default
  found = answers()
  assert not np.isfinite(found["b"]).any()
  for name in ("a", "p"):
    assert np.array_equal(found[name], expected[name])
  predictor.remove("b")
  # The stream of a is now the first of its group; a stays in its slot.
  found = answers()
  for name in ("a", "p"):
    assert np.array_equal(found[name], expected[name])
  predictor.add(side_task(backbone, "c", seed=5, width=width))
  assert np.array_equal(answers()["a"], expected["a"])
  predictor.remove("a")
  assert set(answers()) == {"c", "p"}
  assert inference.read_program._cache_size() == size


@pytest.mark.parametrize("file", ["a", "a.safetensors"])
def test_a_task_with_a_stream_is_saved(backbone, images, tmp_path, file):
  task = side_task(backbone, "a", mixing="none", regime="cls+side")
  mv.save_task(task, tmp_path / file)
  found = mv.load_task(tmp_path / file, backbone)
  assert found.spec == task.spec
  assert found.digest == task.digest
  expected = mv.forward(backbone, task, images)["a"]
  assert np.array_equal(mv.forward(backbone, found, images)["a"], expected)


def test_slots_without_streams_have_no_side_part(backbone):
  slots = mv.fill_slots(backbone, random_task(backbone, "a"))
  assert "side" not in slots.arrays.parts


def test_patches_of_a_stream_see_only_their_neighbours():
  """A 3 x 3 convolution in each layer; none for the class token."""
  backbone = tiny_backbone(depth=1)
  slots = mv.fill_slots(backbone, side_task(backbone, "a"))
  groups = slots.arrays.parts["side"]
  n, side = backbone.config.num_patches, 4
  assert n == side**2

  def tokens(keys):
    keys = jnp.asarray(keys)
    streams = SideStreams(groups, backbone.config, None)
    return np.asarray(streams.attention_terms(0, keys, keys)[0].tokens)[0, 0]

  plain = np.zeros((1, 2, 1 + n, 16), np.float32)
  expected = tokens(plain)
  for patch in range(n):
    keys = plain.copy()
    keys[0, :, 1 + patch] = np.linspace(-1, 1, 16)
    moved = np.abs(tokens(keys) - expected).max(-1) > 1e-6
    rows = abs(np.arange(n) // side - patch // side) <= 1
    columns = abs(np.arange(n) % side - patch % side) <= 1
    assert np.array_equal(moved, [False, *(rows & columns)])


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("memory+cls", "in this order: 'cls\\+memory'"),
    ("cls+cls", "once, in this order: 'cls'"),
    ("memory+side", "expected 'cls' in the list"),
    ("cls+memory", "short name, 'memory_masked'"),
    ("cls+adapters", "expected one of full, .*, or some of cls, memory"),
  ],
)
def test_invalid_lists_of_parts_are_refused(name, reason):
  assert not is_regime(name)
  with pytest.raises(ConfigError, match=reason):
    get_regime(name)


def test_a_list_of_parts_is_a_masked_regime(backbone):
  kind = get_regime("cls+memory+side")
  assert kind.trained == ("head", "cls", "memory", "side")
  assert kind.composes
  assert all(is_regime(name) for name in REGIMES)
  with pytest.raises(TaskError, match="side_width"):
    side_task(backbone, "a", width=0)
  with pytest.raises(TaskError, match="side_mixing"):
    side_task(backbone, "a", mixing="attention")

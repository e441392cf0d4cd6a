import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit.config import OptimConfig
from memory_vit.model import trees
from memory_vit.train.optim import make_optimizer, make_schedule, warmup_steps

CONFIG = OptimConfig(warmup=0.1)


def test_schedule_warms_up_and_decays():
  schedule = make_schedule(CONFIG, 2.0, 100)
  rates = [float(schedule(step)) for step in range(100)]
  np.testing.assert_allclose(rates[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
  assert rates[10] == 2.0
  assert all(np.diff(rates[10:]) < 0)
  assert 0 < rates[-1] < 0.01
  flat = dataclasses.replace(CONFIG, schedule="constant")
  assert float(make_schedule(flat, 2.0, 100)(99)) == 2.0


def reference(warmup, total, *, cosine):
  """Linear warm-up in so many steps, then half a cosine; peak 2.0."""
  done = np.arange(total)
  before = 2.0 * (done + 1) / max(warmup, 1)
  share = (done - warmup) / max(1, total - warmup)
  after = (1.0 + np.cos(np.pi * share)) if cosine else np.full(total, 2.0)
  return np.where(done < warmup, before, after)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize(
  ("given", "total", "warmup"),
  [
    ({"warmup": 0.29}, 100, 29),  # int(0.29 * 100) is 28
    ({"warmup": 0.28}, 100, 28),
    ({"warmup": 0.07}, 100, 7),  # ceil(0.07 * 100) is 8
    ({"warmup": 0.025}, 50, 1),
    ({"warmup": 0.025}, 10, 0),
    ({"warmup": 0.0}, 7, 0),
    ({"warmup": 1.0}, 7, 7),
    ({"warmup_steps": 1}, 7, 1),
    ({"warmup_steps": 5}, 40, 5),
    ({"warmup_steps": 5, "warmup": 0.5}, 40, 5),  # instead of the share
    ({"warmup_steps": 7}, 7, 7),
  ],
)
def test_schedule_equals_numpy(given, total, warmup, schedule):
  config = OptimConfig(**given, schedule=schedule)
  assert warmup_steps(config, total) == warmup
  rates = jax.vmap(make_schedule(config, 2.0, total))(jnp.arange(total))
  expected = reference(warmup, total, cosine=schedule == "cosine")
  np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [10, 100, 20_000])
def test_warmup_share_is_rounded_to_the_nearest_step(steps):
  """For every share with three digits, by whole numbers alone."""
  for thousandths in range(1001):
    config = OptimConfig(warmup=thousandths / 1000)
    found = warmup_steps(config, steps)
    assert 2 * abs(1000 * found - thousandths * steps) <= 1000


@pytest.mark.parametrize("total", [1, 2, 11, 40])
def test_schedule_of_short_runs_reaches_its_peak(total):
  schedule = make_schedule(CONFIG, 2.0, total)
  rates = [float(schedule(step)) for step in range(total)]
  assert all(0 < rate <= 2.0 for rate in rates)
  assert max(rates) == 2.0


def step(config, params, grads, **rates):
  schedules = {
    name: make_schedule(config, rate, 10) for name, rate in rates.items()
  }
  optimizer = make_optimizer(dict.fromkeys(schedules, config), schedules)
  state = optimizer.init(params)

  @jax.jit  # by itself, each operation would be compiled alone
  def update(params, state):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(2):  # the second step shows the momentum
    params, state = update(params, state)
  return params, state


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_update_of_a_task_is_the_same_beside_another_task(name):
  config = OptimConfig(name=name, weight_decay=0.1)
  params = {"a": {"w": jnp.ones(3)}, "b": {"w": jnp.ones((2, 3))}}
  grads = {
    "a": {"w": jnp.array([3.0, 4, 0])},
    "b": {"w": 1e6 * jnp.ones((2, 3))},
  }
  both, _ = step(config, params, grads, a=0.1, b=7.0)
  alone, _ = step(config, {"a": params["a"]}, {"a": grads["a"]}, a=0.1)
  assert np.array_equal(both["a"]["w"], alone["a"]["w"])
  assert not np.array_equal(both["b"]["w"], params["b"]["w"])


def test_gradients_are_clipped_over_one_task():
  config = OptimConfig(warmup=0.0, schedule="constant", momentum=0.0)
  params = {"a": {"w": jnp.zeros(2), "v": jnp.zeros(1)}}
  grads = {"a": {"w": jnp.array([3.0, 0]), "v": jnp.array([4.0])}}
  after, _ = step(config, params, grads, a=1.0)
  np.testing.assert_allclose(after["a"]["w"], [-1.2, 0], rtol=1e-6)
  np.testing.assert_allclose(after["a"]["v"], [-1.6], rtol=1e-6)
  free = dataclasses.replace(config, grad_clip=0.0)
  after, _ = step(free, params, grads, a=1.0)
  np.testing.assert_allclose(after["a"]["v"], [-8.0], rtol=1e-6)


def test_optimizer_state_has_slots_for_trained_arrays_only():
  params = {"a": {"w": jnp.ones((2, 5))}}
  _, state = step(OptimConfig(), params, params, a=0.1)
  arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
  assert [leaf.shape for leaf in arrays] == [(2, 5)]


@pytest.mark.parametrize(
  ("regime", "decaying"),
  [
    ("memory_masked", {"head/kernel"}),
    (
      "side_masked",
      {
        "head/kernel", "side/conv", "side/down/kernel", "side/up/keys",
        "side/up/values", "side/mlp/Dense_0/kernel", "side/mlp/Dense_1/kernel",
      },
    ),
    ("probe", {"head/kernel", "probe/down", "probe/up"}),
    ("full", None),
  ],
)  # fmt: skip
def test_weight_decay_applies_to_kernels_only(regime, decaying):
  """Not biases, LayerNorms, tokens, memory or position embeddings."""
  task = mv.init_task(
    jax.random.key(0), tiny_backbone(depth=1), name="t", num_classes=2,
    regime=regime, bottleneck=4 if regime == "probe" else 0,
  )  # fmt: skip
  params = jax.tree.map(lambda a: jnp.ones_like(a), task.params)
  config = OptimConfig(name="adamw", weight_decay=0.1)
  grads = jax.tree.map(jnp.zeros_like, params)
  after, _ = step(config, {"a": params}, {"a": grads}, a=0.1)
  found = {
    name for name, a in trees.flatten(after["a"]).items() if (a < 1).any()
  }
  kernels = {n for n in trees.flatten(params) if n.endswith("/kernel")}
  assert found == (kernels if decaying is None else decaying)
  assert regime != "full" or len(found) == 8


PARTS = {"head": jnp.ones(1), "cls": jnp.ones(2), "memory": jnp.ones(3)}


def test_clip_by_part_clips_each_part_separately():
  config = OptimConfig(
    warmup=0.0, schedule="constant", momentum=0.0, clip_by="part"
  )
  params = {"a": PARTS, "b": PARTS}
  grads = {"a": {"head": jnp.array([0.5]), "cls": jnp.array([0.3, 0.0]),
                 "memory": jnp.array([0, 300.0, 400.0])}}  # fmt: skip
  grads["b"] = jax.tree.map(lambda g: 9 * g, grads["a"])
  after, _ = step(config, params, grads, a=1.0, b=0.5)
  moved = jax.tree.map(lambda new, old: new - old, after["a"], PARTS)
  # Two steps. What is shorter than the clip keeps its length.
  np.testing.assert_allclose(moved["head"], [-1.0], rtol=1e-6)
  np.testing.assert_allclose(moved["cls"], [-0.6, 0], rtol=1e-6)
  np.testing.assert_allclose(moved["memory"], [0, -1.2, -1.6], rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_factors_scale_the_learning_rates_of_parts(name):
  """As if each part was trained with a learning rate of its own."""
  config = OptimConfig(name=name, grad_clip=0.0)
  with_factors = dataclasses.replace(config, cls_factor=3.0, memory_factor=0.5)
  grads = jax.tree.map(lambda a: 0.1 * jnp.arange(1.0, a.size + 1), PARTS)
  after, _ = step(with_factors, {"a": PARTS}, {"a": grads}, a=0.1)
  for part, factor in (("head", 1.0), ("cls", 3.0), ("memory", 0.5)):
    alone, _ = step(
      config, {"a": {part: PARTS[part]}}, {"a": {part: grads[part]}},
      a=0.1 * factor,
    )  # fmt: skip
    np.testing.assert_allclose(after["a"][part], alone["a"][part], rtol=1e-6)


def test_update_of_parts_is_the_same_beside_another_task():
  config = OptimConfig(clip_by="part", memory_factor=0.1)
  big = jax.tree.map(lambda a: 1e6 * a, PARTS)
  both, _ = step(config, {"a": PARTS, "b": PARTS}, {"a": PARTS, "b": big},
                 a=0.1, b=7.0)  # fmt: skip
  alone, _ = step(config, {"a": PARTS}, {"a": PARTS}, a=0.1)
  for part in PARTS:
    assert np.array_equal(both["a"][part], alone["a"][part])


def by_hand(config, params, grads, rates, clip_names):
  """The documented optimiser in NumPy; returns {part: values} after each step.

  Args:
    config: of one task.
    params: {part: values} before the first step.
    grads: [{part: values} of each step].
    rates: learning rate of each step.
    clip_names: groups of parts whose norm is clipped together.
  """
  params = {k: np.asarray(v, np.float64) for k, v in params.items()}
  first = {k: np.zeros_like(v) for k, v in params.items()}
  second = {k: np.zeros_like(v) for k, v in params.items()}
  factors = {"cls": config.cls_factor, "memory": config.memory_factor}
  after = []
  for i, (given, rate) in enumerate(zip(grads, rates, strict=True)):
    grad = {k: np.asarray(v, np.float64) for k, v in given.items()}
    for names in clip_names if config.grad_clip else ():
      norm = np.sqrt(sum((grad[name] ** 2).sum() for name in names))
      for name in names:
        grad[name] = grad[name] * min(1.0, config.grad_clip / norm)
    for k, g in grad.items():
      if config.name == "sgd":
        first[k] = config.momentum * first[k] + g
        update = -rate * first[k]
      else:
        first[k] = 0.9 * first[k] + 0.1 * g
        second[k] = 0.999 * second[k] + 0.001 * g**2
        mean = first[k] / (1 - 0.9 ** (i + 1))
        spread = np.sqrt(second[k] / (1 - 0.999 ** (i + 1)))
        # Decoupled: beside the gradient, towards zero. No part is a kernel.
        decay = 0
        update = -rate * (mean / (spread + 1e-8) + decay)
      params[k] = params[k] + factors.get(k, 1.0) * update
    after.append(dict(params))
  return after


@pytest.mark.parametrize(
  "values",
  [
    {"momentum": 0.9},
    {"momentum": 0.5, "grad_clip": 0.0},
    {"momentum": 0.9, "clip_by": "part", "cls_factor": 3.0},
    {"momentum": 0.0, "memory_factor": 0.2, "schedule": "constant"},
    {"name": "adamw"},
    {"name": "adamw", "weight_decay": 0.3, "memory_factor": 2.0},
  ],
  ids=lambda values: ",".join(f"{k}={v}" for k, v in values.items()),
)
def test_optimizer_equals_numpy(values):
  """Five steps, with gradients that change: the first of them are clipped."""
  config = OptimConfig(warmup=0.4, **values)
  steps, peak = 5, 0.2
  # Two steps of linear warm-up, then the cosine over the three that are left.
  decay = 0.5 * (1 + np.cos(np.pi * np.arange(3) / 3))
  rates = peak * np.array([0.5, 1.0, *decay])
  if config.schedule == "constant":
    rates[2:] = peak
  schedule = make_schedule(config, peak, steps)
  np.testing.assert_allclose([schedule(i) for i in range(steps)], rates,
                             rtol=1e-5, atol=1e-8)  # fmt: skip
  rng = np.random.default_rng(0)
  params = {k: rng.standard_normal(v.shape) for k, v in PARTS.items()}
  grads = [
    {k: size * rng.standard_normal(v.shape) for k, v in PARTS.items()}
    for size in (3.0, 1.0, 0.3, 0.1, 0.03)
  ]
  together = [tuple(PARTS)]
  alone = [(part,) for part in PARTS]
  expected = by_hand(
    config,
    params,
    grads,
    rates,
    alone if config.clip_by == "part" else together,
  )
  optimizer = make_optimizer({"a": config}, {"a": schedule})
  found = {"a": jax.tree.map(jnp.asarray, params)}
  state = optimizer.init(found)
  for grad, wanted in zip(grads, expected, strict=True):
    given = {"a": jax.tree.map(jnp.asarray, grad)}
    updates, state = optimizer.update(given, state, found)
    found = optax.apply_updates(found, updates)
    for part in PARTS:
      np.testing.assert_allclose(
        found["a"][part], wanted[part], rtol=1e-4, atol=1e-5
      )
